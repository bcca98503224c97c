"""The weights of a checkpoint: which files and tensors there are, how they are quantized, and how they are read.

Others take `check_tensors`, `checkpoint_revision` and `CONFIG_FILE` from `checkpoint`, `WeightReader` from `reader`,
`QuantizedWeight` and `quantize_weight` from `quantized_weight`, `WeightScheme` from `quantization_config`, and
`load_shared` from `shared_weights`.
The room must not know layers, kernels or model families; callers give it the names, shapes and slices of tensors.
"""
