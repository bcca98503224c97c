"""Attention by libraries (FlashInfer, FlashAttention 3) that may replace this package's kernels (`engine.attention`).

Others take `LibraryAttention` and `load_attention_library` from `attention`, and `check_library` from `capabilities`,
which is torch-free because memory plans ask it too.
The room must not know models or requests; a library sees queries, pages and `AttentionMetadata`.
"""
