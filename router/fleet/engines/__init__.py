"""Other engines behind this router: servers with vLLM's HTTP API, KV events and metrics, as workers of the fleet.

`router.composition` takes `engine_follower.EngineFollower`, which stands where a follower of one of our own workers
does; `engine_link` carries requests and tokens. The other modules translate, purely: `completion_request` and
`completion_stream` (a submission and its answer), `metrics_text` (load), `block_names` and `event_sequence` (KV events,
which `event_subscription` receives). Nothing of HTTP's public side, of texts or of policies is known here.
"""
