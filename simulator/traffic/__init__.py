"""Describes recorded traffic: lengths, rates, bursts, sessions, and what prefix caches of any size would hit.

`describe.describe` returns the `TrafficReport` of a trace (`penstock.bench.traces`); `html_report` makes charts of it,
and `simulator.planning` sizes deployments by it. Everything is computed from the records: the room knows no model, no
accelerator and no simulated worker, and its modules are pure.
"""
