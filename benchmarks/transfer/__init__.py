"""Benchmarks KV transfers between two processes of one host, compared with memcpy and the bare transports.

`python -m benchmarks.transfer` runs it. `peer` is the receiving process and `sending` the sending end, both of which
the GPU benchmark takes, too. Only the client's view of a transfer starts workers.
"""
