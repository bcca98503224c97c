"""Bookkeeping of worker pools: which workers there should be, which there are, and what each process may use.

Others take `Pools`, `Pool`, `Slot` and `Incarnation` from `pool`, the pure choices from `pool_policy`, whose turn it is
to start from `start_policy`, what fits from `capacity_policy`, `ResourceShare` from `resources` and the warm processes
from `spares`. Only `spares` has tasks; the rest is pure.
This room must not know Ray, gRPC or how a worker is drained.
"""
