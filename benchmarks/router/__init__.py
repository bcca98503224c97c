"""Benchmarks of the router: added latency and throughput, placement decisions, and the prefix index.

`python -m benchmarks.router` runs a router between null workers and clients; `choice` and `index` are run by themselves
in one thread. Nothing here loads torch into the measured processes.
"""
