"""A worker's own Prometheus port: what the worker reports to routers, read from the worker itself.

The shell opens a `MetricsPort` over a `WorkerCollector`, which reads the latest load report when Prometheus scrapes,
and over `StepMetrics`, whose `observe` the step loop calls once a step. `model_work` estimates how busy the device is,
`page_use` how full the pages are. Nothing that the room exports is of one request, so that it may go to every scraper.
"""
