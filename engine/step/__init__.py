"""The host side of an engine step: its work (`sequence`, `plan`, `row_table`), its tensors (`batch`), and the threads
that run it.

Others take `Sequence`, `ScheduledSequence`, `StepPlan`, `RowTable`, `StepTokens`, `StepLoop`, `StepThread` and
`finish_reason`. `sequence`, `plan`, `row_table` and `finish` import no torch: schedulers and the simulator use them.
The room knows nothing of requests, transfers or who receives a token.
"""
