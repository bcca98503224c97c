"""Learns from reports what work costs on each worker and link, and tracks the work in flight on them.

`cost_model` learns step times, `link_costs` transfer times, `inflight` counts work that no report shows yet, and
`predictions` compares estimates with outcomes. The fleet and dispatch feed these modules, placement reads them, and the
autoscaler sizes pools by them. Pure: the room must not know the clock, channels or policies.
"""
