"""Makes other engines workers of the fleet: servers with vLLM's HTTP API, KV events and metrics.

`router.server` calls `follow.follow_engines`, which adds an `engine_follower.EngineFollower` for each engine, in
place of the `WorkerFollower` of one of our own workers; `engine_link` carries requests and tokens. The other modules
are pure translations: `completion_request` and `completion_stream` (a submission and its answer), `metrics_text`
(load), `block_names` and `event_sequence` (KV events, which `event_subscription` receives). This room knows nothing of
the public HTTP API, of texts or of policies.
"""
