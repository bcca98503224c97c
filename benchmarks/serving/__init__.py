"""Benchmarks the whole serving path: latencies at fixed concurrency, and disaggregated compared with colocated
serving.

`python -m benchmarks.serving` and `python -m benchmarks.serving.latency` run them; `rounds` sends the requests, and
`deployments` starts workers and a router as plain processes, which the transfer benchmark takes, too.
"""
