"""Serves the API over HTTP: routes, event streams, connections and TLS.

`router.server` uses `make_app` from `app`, `make_operations_app` from `operations`, and the limits and TLS settings of
its listeners from `connections`. `router.api.openai` and `router.api.translation` define what the bodies mean; this
room must not know that, nor any worker. An error's class in `penstock.errors` defines its status; `error_answers`
writes the answer.
"""
