"""Serves the public gRPC API: reads messages within bounds and writes outputs as responses.

`router.server` uses `InferenceService`, and `FloodGuard`, which ends connections that send without end. This room knows
neither HTTP nor its formats.
"""
