"""Serves the public gRPC API: reads messages within bounds and writes outputs as responses.

`router.server` uses `InferenceService`. This room knows neither HTTP nor its formats.
"""
