"""The placement policies: given a request's demand and views of the workers, they choose a pair of workers.

Others use `policies.make_policy` and the types of `interface`. `prices` estimates the seconds of each stage,
`end_costs` weighs and sums them (`wide_ends` for hundreds of workers at once), `kv_aware` searches the pairs, and
`policies` names all policies. A new cost term needs a function in `end_costs` (or `prices`), its twin in `wide_ends`, a
weight in `penstock.config.KvAwareConfig`, and a test. The room must not know I/O, asyncio, gRPC or the clock.
"""
