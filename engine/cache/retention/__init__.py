"""Decides how long cached pages stay: the order of eviction, tenants' shares, and what sessions teach about reuse.

The page pool takes `EvictionOrder`, the prefix cache and the workers take `Retention`. Everything here is pure
bookkeeping driven by the step loop: times are passed in. It knows pages, hashes, tenants' names and sessions' names,
but no requests, transfers or tensors.
"""
