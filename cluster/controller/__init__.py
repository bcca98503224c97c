"""The controller: owns desired replica counts, replaces lost workers and publishes the membership that routers follow.

Others take `make_controller` from `composition`, `Controller` and `Snapshot` from `controller`, the Admin server from
`admin_service`, and the interface of a process from `supervised_process`.
This room must not know Ray, prompts, tokens or pages: processes come from the `spawn` function that it is given.
"""
