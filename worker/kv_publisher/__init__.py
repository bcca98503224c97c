"""Publishes a worker's prefix cache in vLLM's event schema over ZMQ, for routers of other projects.

`worker.shell` takes `publisher.KvPublisher`; `published_pages` is pure and turns our events into theirs, and
`replay_window` keeps what subscribers may ask for again. A thread of its own reads the cache's event log as any router
does, so the step loop waits for nothing here. Nothing in this room knows models, requests or gRPC.
"""
