"""A worker's own Prometheus port: what the worker reports to routers, read from the worker itself.

The shell opens a `MetricsPort` over a `WorkerCollector`. This room reads the latest load report when Prometheus scrapes
and costs a step nothing; it knows neither requests nor tokens, so that its answers may go to every scraper.
"""
