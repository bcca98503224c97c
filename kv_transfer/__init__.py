"""Moves KV pages between the page pools of workers: the KV plane.

Workers take `KvSender`, `KvReceiver`, `open_sender` and `open_receiver` from `endpoints`, and the pure state of a
transfer from `session`. Rooms import downwards only: `session` and `layout`, then `transports`, then `send` and
`receive`, then `ranks`, then `endpoints`. Nothing here knows requests, gRPC, Ray or the page pool's bookkeeping.
"""
