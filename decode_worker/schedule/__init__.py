"""Schedules decode steps: which sequences run or wait, which pages they get, and which step may be computed ahead.

The worker takes `DecodeScheduler`, `Pace` and `StepDriver` from here; the simulator takes the first two. `scheduler`
composes a step, `chunk_budget` limits its chunks, `bulk_policy` its bulk sequences by the learned `step_costs`, and
`preemption_policy` chooses who loses its pages when they run out. All but the driver are pure: they read no clock and
do no I/O. Nothing here knows requests, routers or transfers; a sequence whose pages come from elsewhere joins once
they have landed.
"""
