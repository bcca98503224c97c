"""The layers of a decoder: attention, feed-forward, linear and rotary embedding, with the weights that they own.

`engine.models.decoder` builds them from a `LayerTensors` reader and calls them in every step; `can_multiply` in
`linear` says which quantized weights this machine computes with. The kernels come from `engine.kernels` and
`engine.cpu`. The room must not know requests, batches' sequences or files; it sees tensors, `AttentionMetadata` and
model configs.
"""
