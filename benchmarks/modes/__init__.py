"""Compares disaggregated with colocated serving at equal cores: the same requests at the same times, by load and SLO.

`python -m benchmarks.modes` measures and writes `results/modes.json`, `results/modes.html` and the tables and charts of
docs/modes.md. It keeps raw results in `build/modes` and measures only the parts that its options name, so that a long
sweep can be run in pieces.
"""
