"""The HTTP side of the API: routes, event streams, connections and TLS.

`router.server` takes `make_app` from `app`, `make_operations_app` from `operations`, and limits and settings of its
listeners from `connections` and `tls`. What the bodies mean is decided in `router.api.openai` and
`router.api.translation`; this room must not know it, nor any worker. The status of an error is part of its class in
`penstock.errors`; `error_answers` writes it.
"""
