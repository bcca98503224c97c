"""Knows the sizes of models and the peaks of accelerators: bytes and FLOPs of weights, KV pages and products. Pure.

* `model_shape`: `MODEL_SHAPES` and `find_shape(name or checkpoint folder)`: parameters, bytes of KV a token, FLOPs.
* `language_model`: `language_model_config(config)` of a multi-modal model's file.
* `accelerators`: `ACCELERATORS`, published peaks with assumed efficiencies; `accelerator_of(device name)`.

Workers count FLOPs and bytes with it, and `penstock plan` and the simulator derive costs from it. Nothing here
measures.
"""
