"""Benchmarks speculation: what verifying tokens costs, and what it gains, by batch and kind of text.

`python -m benchmarks.engine.speculation` runs a decode worker's whole loop with `decode.speculation` off and `auto` in
turns. `replay` makes a model of random weights emit a given text, `texts` provides these texts, and `step_costs`
measures single steps.
"""
