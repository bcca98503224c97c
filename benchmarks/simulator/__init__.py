"""Measures virtual time itself: how many simulated requests a second of processor time it serves, and at what scale.

`python -m benchmarks.simulator` compares deployments of several sizes, `python -m benchmarks.simulator.scale` runs a
thousand workers. Nothing imports this package.
"""
