"""Models prefill and decode workers in virtual time.

The schedulers, page pool, prefix cache, transfer session and fences are the real ones; `PrefillModel` and `DecodeModel`
replace the shells around them, which are bound to gRPC and threads. They do not know routers or policies.
"""
