"""The parts that prefill and decode workers share: the process shell and everything in it besides the role's core.

Roles take `shell.WorkerShell` and `main.main`, and `handover`, `fence_monitor` and `channels` to work with other
workers. `metrics` says how to add a worker metric, `pull` brings cached pages from elsewhere, `hints` follows KV hints,
and `kv_publisher` publishes the cache for other projects. Nothing here knows scheduling, requests or a role.
"""
