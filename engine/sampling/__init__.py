"""Turns logits into tokens: edits, temperature, filters, and a random number that depends on (seed, position) alone.

The engine takes `sample` (with texts, edits and log-probabilities) and `sample_rows` (without); kernels take
`SamplingTensors`. A token depends on nothing but its own row, so batching and migration never change a text.
"""
