"""Learns from reports what work costs on each worker and link, and tracks the work in flight there.

`cost_model` learns step times, `link_costs` transfer times, `inflight` counts work that no report shows yet, and
`predictions` compares estimates with what happened. Placement reads them, the fleet and dispatch feed them, and the
autoscaler sizes pools by them. Pure: the room must not know the clock, channels or policies.
"""
