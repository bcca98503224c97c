"""An engine step on the host: what is computed (`sequence`, `plan`, `row_table`), as tensors (`batch`), and by whom.

Others take `Sequence`, `ScheduledSequence`, `StepPlan`, `RowTable`, `StepTokens`, `StepLoop`, `StepThread` and
`finish_reason`. `sequence`, `plan`, `row_table` and `finish` import no torch: schedulers and the simulator use them.
The room knows nothing of requests, transfers or who receives a token.
"""
