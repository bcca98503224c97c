"""Shows where a request's time went, as stages, a waterfall and OpenTelemetry spans.

Others use `stages.EndedCompletion` and `stages.WorkerLeg`, `waterfall.waterfall` and, if tracing is on,
`tracer.RequestTracer`, which fills a `RequestTrace` for each sampled request. Everything is computed after a completion
has ended, from the times that the router records anyway and from the worker's `Timing`; workers send no spans. The room
must not decide anything, keeps nothing of a prompt, an output or a tenant, and imports OpenTelemetry only if tracing is
on.
"""
