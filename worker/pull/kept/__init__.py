"""KV that outlives a crash: a small process keeps the memory of dead workers' pools, and workers take pages back.

`keeper` is that process; `keeper_link` is a worker's connection to it; `kept_pages` decides on the step loop which
pages are copied back, by `restore_policy`. A shell takes `KeptPages`. The room knows nothing of requests and routers.
"""
