"""Simulates routing policies when more work arrives than the workers can do: hits, first tokens and balance.

`python -m benchmarks.overload` replays each trace at each load under each policy (`study`), and writes
`results/overload.json` and the tables and charts of docs/overload.md (`report`). The same seed gives the same figures
on every machine, so results are committed and compared between versions.
"""
