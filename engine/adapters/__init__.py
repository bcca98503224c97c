"""LoRA adapters: their checkpoint folders, the slots that hold their weights, and the queue of sequences that wait for
a slot.

The engine takes `AdapterStore` and `StepAdapters` from `slot_store`, `EngineAdapters` from `engine_adapters`; workers
take `AdapterQueue` from `queue`; memory plans take `adapter_bytes` from `products`, which is torch-free.
The room must not know requests, transfers or HTTP; an adapter is a `penstock.kv.adapter_files.AdapterRef`.
"""
