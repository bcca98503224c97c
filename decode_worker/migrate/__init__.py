"""Migrates running sequences between decode workers without recomputing their KV.

`outgoing` is the source side (with `client`, its calls to targets), and `incoming` the target side; `service`
translates gRPC for both. `migration_policy` decides which sequences migrate and when they pause; `sequence_state` is
the wire form of a sequence without its pages. `decode_worker.server` composes them. Nothing here knows routers: a
migrated sequence waits until its router brings the ticket.
"""
