"""Triton kernels, one operation a file, each with a wrapper that checks shapes, strides and dtypes.

Others take `TritonAttention` and `TritonOps` from `backend`, `sample_tokens` from `sample`, `make_product` from
`quantized_gemm` and `copy_pages` from `copy_pages`. Importing the room needs Triton, so its users import it lazily.
The room must not know layers, models or requests. Its plain-torch references are in `engine.kernels`.
"""
