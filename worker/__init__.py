"""The parts that prefill and decode workers share: the process shell and everything in it besides the role's core.

Roles take `shell.WorkerShell` and `main.main`, and `handover`, `fence_keeper` and `channels` to work with other
workers. Nothing here knows scheduling, requests or a role.
"""
