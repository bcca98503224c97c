"""The HTTP side of the API: routes, event streams, connections and TLS.

`router.server` takes `make_app` and `make_operations_app` from `app`, and limits and settings of its listeners from
`connections` and `tls`. What the bodies mean is decided in `router.api.openai` and `router.api.translation`; this room
must not know it, nor any worker.
"""
