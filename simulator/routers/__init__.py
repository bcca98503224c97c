"""Models routers in virtual time: the real admission, prefix index, policies and ledger, driven by callbacks.

`RouterModel` follows `router.dispatch`, `GateModel` `router.admission.gate`, `FollowerModel`
`router.fleet.worker_follower` and `PlacerModel` `router.dispatch.placement`. They see workers only through messages.
"""
