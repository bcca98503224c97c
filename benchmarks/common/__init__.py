"""Helpers that several benchmarks share: result tables, checkpoints of random weights, floors, child processes.

`report` publishes rows, `shapes` writes checkpoints, `floor` times the bare-torch floor, `process_group` runs children
and `vllm_process` finds vLLM. Nothing here knows a particular benchmark.
"""
