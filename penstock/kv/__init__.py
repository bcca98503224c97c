"""The names of KV pages, and the events that inform routers where pages are cached; shared by routers and workers.

Others take `hash_pages` and `make_salt` from `page_hash`, `KvEventLog` from `events`, and from `adapters` the identity
of adapters, which is part of a page's identity. `block_events` is the form that other projects give such events.
Nothing here holds a page, and only `adapters` reads files.
"""
