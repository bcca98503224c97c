"""Gets prompts prefilled by prefill workers, or decides that this worker computes them itself.

`placement_policy` chooses by the costs that `remote_costs` and `schedule.step_costs` have learned, and by what
`placement_state` reads from the scheduler. `prefill_attempts` acts on the choice and hedges, `client` calls prefill
workers (`warm_calls` opens calls in advance), and `transfer_table` owns every transfer into this worker's page pool,
migrating sequences included, with its fences. The worker takes `PrefillAttempts` and `TransferTable` from here. The
simulator takes the policy and the state. Nothing here delivers tokens or schedules steps.
"""
