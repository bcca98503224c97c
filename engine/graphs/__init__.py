"""CUDA graphs of decode steps, and the steps that compile every kernel before the first request.

The engine takes `GraphRunner`, `capture_on_all_ranks` and `warm_up_batches`. Graphs replay batches that
`engine.step.batch` lays out; they know neither sequences nor sampling.
"""
