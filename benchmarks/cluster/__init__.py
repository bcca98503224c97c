"""Benchmarks whole deployments under change: faults, role flips and drains, and the start of workers.

`faults`, `flips` and `startup` are run as modules; `status_follower` waits for states of a Ray deployment. They drive
a deployment only through its public interfaces: signals, the admin API and clients.
"""
