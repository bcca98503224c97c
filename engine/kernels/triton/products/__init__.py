"""Matrix products of Triton: with quantized weights, and of rows grouped by expert.

Others take `make_product` and `fits` from `quantized_gemm`, and `grouped_gemm`. The room knows weights and their codes,
but no layers.
"""
