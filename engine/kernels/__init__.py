"""Attention and layer operations over the paged KV pool: one interface, and the implementations that a device can run.

Others take `AttentionBackend`, `AttentionMetadata` and `KvLayer` from `attention_interface`, `LayerOps` from
`layer_ops`, `select_backend` and `select_ops` from `backends`, and `select_copy` from `page_copy`. `reference` and
`layer_ops` hold the plain-torch versions that the tests compare every other kernel with.
The room must not know requests, sequences, model families or layers; it sees tensors and `AttentionMetadata`.
"""
