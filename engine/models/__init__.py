"""Model families: what `config.json` says of a model, the tensors it needs, and the decoder that computes all of them.

Others take `ModelConfig` from `config`, `load_model` from `loader`, `Decoder` from `decoder`, `tensor_shapes` from
`shapes` and `tensor_slices` from `sharding`. A new family is an entry in `families`. All but `decoder`, `loader`
and `gguf` are torch-free, because memory plans and command-line tools read them too.
The room must not know requests, scheduling or page pools.
"""
