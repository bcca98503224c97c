"""Keeps the books of the worker pools: which workers there should be, which exist, and what each process may use.

Others take `Pools`, `Pool`, `Slot` and `Incarnation` from `pool`, choices over slots from `pool_policy`, the order of
starts from `start_policy`, what fits from `capacity_policy`, `ResourceShare` from `resources` and warm processes from
`spares`. Only `spares` has tasks; the rest is pure. This room must not know Ray, gRPC or how a worker is drained.
"""
