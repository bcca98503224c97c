"""C++ kernels for CPUs (`csrc/`), their build, and the Python classes that check arguments and call them.

Others take `NativeAttention` and `NativeOps` from `native`, `pack_for_tiles` from `linear`, `make_stack` from
`decoder_stack`, `load_library` and `load_native` from `library`, and `bind_to_cores` from `cores`.
The room must not know requests, schedules or checkpoints; it computes on tensors and page tables that it is given.
"""
