"""Provides metrics that are cheap enough to update for every request and every step.

Routers and workers take `CounterFamily`, `HistogramFamily` and `observe_all` from `families`. `worker_metrics` declares
what workers count and report with their load; `router.metrics` and `worker.metrics` export it.
"""
