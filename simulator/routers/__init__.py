"""A router in virtual time: the real admission, prefix index, policies and ledger, under callbacks.

`RouterModel` follows `router.dispatch`, `GateModel` `router.admission.gate`, `FollowerModel`
`router.fleet.worker_follower` and `PlacerModel` `router.dispatch.placement`. It sees workers only through messages.
"""
