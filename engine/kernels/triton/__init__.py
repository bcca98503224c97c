"""Triton kernels, one operation a file, each with a wrapper that checks shapes, strides and dtypes.

Others take `TritonAttention` and `TritonOps` from `backend`, `sample_tokens` from `sample`, `copy_pages` from
`copy_pages`, and products from `products`. Importing the room needs Triton, so its users import it lazily.
The room must not know layers, models or requests. Its plain-torch references are in `engine.kernels`.
"""
