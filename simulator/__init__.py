"""Simulates whole deployments in virtual time, with the real decisions of routers, workers and the autoscaler.

`fleet.SimulatedFleet` builds a deployment from workers, links and a router; `replay`, `overload` and `check` run it.
`world/` has time, network and faults, `costs/` the costs of work, and `workers/` and `routers/` the shells around the
real decision code. Nothing here reads a clock, opens a socket or imports torch or ray; the same seed gives the same
run, bit for bit.
"""
