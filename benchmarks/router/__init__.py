"""Benchmarks the router: added latency and throughput, placement decisions, the prefix index, and whole traces.

`python -m benchmarks.router` runs a router between null workers and clients; `choice` and `index` are separate commands
that run in one thread, and `replay` replays traces under every policy in virtual time. Nothing here loads torch into
the measured processes.
"""
