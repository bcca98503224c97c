"""Benchmarks of speculation: what verifying tokens costs, and what it gains by batch and kind of text.

`python -m benchmarks.engine.speculation` runs a decode worker's whole loop with `decode.speculation` off and `auto` in
turns. `replay` gives a model of random weights a text to say, `texts` has those texts, and `step_costs` measures single
steps.
"""
