"""Turns logits into tokens: edits, temperature, filters, and a random number that depends only on (seed, position).

The engine takes `sample` (with texts, edits and log-probabilities) and `sample_rows` (without); kernels take
`SamplingTensors`. A token depends only on its own row, so batching and migration never change a text.
"""
