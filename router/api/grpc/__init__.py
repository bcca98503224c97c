"""The public gRPC API: reads messages within bounds, and writes outputs as responses.

`router.server` takes `InferenceService`. It knows neither HTTP nor its formats.
"""
