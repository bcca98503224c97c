"""Counts what a router does and exports it as Prometheus metrics and as reports to the autoscaler.

Other rooms use `metrics.RouterMetrics` (with `admission`), `completion_counts.CompletionCounts` and `demand_report`. A
new metric touches two files: declare its family in `metrics` or the module of its subject (`collectors` for values that
other rooms own), and observe it where the event happens. This room decides nothing and copies no other room's state:
gauges read that state when Prometheus scrapes.
"""
