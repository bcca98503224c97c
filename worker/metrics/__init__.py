"""A worker's own Prometheus port, which exports what the worker reports to routers.

The shell opens a `MetricsPort` over a `WorkerCollector`, which reads the latest load report when Prometheus scrapes,
and over `StepMetrics`, whose `observe` the step loop calls once per step. `model_work` estimates how busy the device
is, and `page_use` how full the pages are. No exported value is about a single request, so every scraper may read them.

To add a metric, declare it in `penstock.metrics.worker_metrics` and observe it where it happens: the collector exports
it here, and routers export it too.
"""
