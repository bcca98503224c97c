"""Tensor parallelism: one replica split between processes ("ranks") of one machine.

`Engine` takes `RankLeader` (rank 0's command of the others) and `ModelPart` (what each rank holds); models take
`ParallelGroup`; process launchers take `spawn_ranks`, `serve_rank`, `WorkerRank` and `RankExtension`. Rank 0 owns the
step loop and all state; the other ranks decide nothing.
"""
