"""Holds helpers that several benchmarks share: result tables, checkpoints of random weights, floors, child processes.

`report` publishes rows, `charts` renders them by `bar_specs`, `results_page` collects them (`make results`), `shapes`
writes checkpoints, `floor` times the bare-torch floor, `process_group` runs children and `vllm_process` finds
vLLM. Only the specs and the page know particular benchmarks.
"""
