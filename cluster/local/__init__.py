"""A worker process that can change its role, with or without Ray.

`cluster.ray.server_actor` takes `RoleHost`, which puts the prefill and decode roles over one engine; `worker` runs it
as a plain process (`python -m cluster.local.worker`) with a gRPC service for flips. It must not know the controller,
pools or Ray.
"""
