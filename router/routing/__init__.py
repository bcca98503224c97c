"""Chooses the prefill and the decode worker of a request: prefix index, costs and policies. Pure decisions.

Dispatch uses `placement_core.PlacementCore` and `decision_record`; the fleet feeds workers' reports to `index` and
`costs`; the simulator runs the same code in virtual time, and the autoscaler reads the cost models. The room must not
know channels, HTTP, admission or where a request's tokens go: time and randomness are passed in, and nothing runs on
an event loop.
"""
