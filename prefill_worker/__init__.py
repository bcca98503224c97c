"""Prefill workers compute prompts and push their KV pages into decode workers' pools.

`server` composes the process, `service` translates gRPC, `worker` owns the jobs, and `scheduler` decides what each step
computes. The simulator takes `scheduler`. Nothing here knows decoding, routers or clients.
"""
