"""Gets prompts prefilled by prefill workers, or decides that this worker computes them itself.

`placement_policy` makes the choice, `prefill_attempts` acts on it and hedges, `client` calls prefill workers, and
`transfer_table` owns every transfer into this worker's page pool, migrating sequences included, with its fences. The
worker takes `PrefillAttempts` and `TransferTable` from here. Nothing here delivers tokens or schedules steps.
"""
