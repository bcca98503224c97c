"""The counts of a router, as Prometheus metrics and as reports for the autoscaler.

Others take `metrics.RouterMetrics` (with `admission`), `completion_counts.CompletionCounts` and `demand_report`. A new
metric touches two files: its family goes into `metrics` or the module of its subject (`collectors` for values that
others own), its observation into the place where it happens. The room decides nothing and keeps no other room's state:
gauges read it when Prometheus scrapes.
"""
