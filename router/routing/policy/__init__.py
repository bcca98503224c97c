"""The placement policies: given a request's demand and views of the workers, they choose a pair of workers.

Others use `policies.make_policy` and the types of `interface`. `prices` estimates the seconds of each stage,
`cost_terms` weighs and sums them (`wide_cost_terms` for hundreds of workers at once), `session_affinity` keeps sessions
together, `kv_aware` searches the pairs, and `policies` names all policies. A new cost term needs a function in
`cost_terms` (or `prices`), its twin in `wide_cost_terms`, a weight in `penstock.config.KvAwareConfig`, and a test.
The room must not know I/O, asyncio, gRPC or the clock.
"""
