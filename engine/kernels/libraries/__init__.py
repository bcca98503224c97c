"""Attention by FlashInfer, FlashAttention 3 or cuDNN in place of this package's own kernels (`engine.attention`).

Others take `LibraryAttention` and `load_attention_library` from `attention`, and from `capabilities` the choice by
device and the check of a model. These are torch-free because memory plans ask them too.
The room must not know models or requests; a library sees queries, pages and `AttentionMetadata`.
"""
