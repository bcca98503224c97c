"""Migrates running sequences between decode workers without recomputing their KV.

The source side is `outgoing` (with `client`, its calls to targets), the target side `incoming`; `service` translates
gRPC for both. `migration_policy` decides which sequences migrate and when they pause; `sequence_state` is the wire form
of a sequence without its pages. `decode_worker.server` composes them. Nothing here knows routers: a migrated sequence
waits for the ticket that its router brings.
"""
