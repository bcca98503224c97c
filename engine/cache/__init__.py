"""KV pages: who holds them, which are findable by hash, and where evicted ones are kept.

Workers take `PagePool`, `PrefixCache` and `KVLayout`; the engine also takes the tiers and the memory itself
(`pool_memory`). The pool and the cache are pure bookkeeping, driven by the step loop. Nothing here knows requests or
transfers beyond the keys of their fences.
"""
