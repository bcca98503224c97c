"""Names KV pages, and informs routers by events where pages are cached. Shared by routers and workers.

Others take `hash_pages` and `make_salt` from `page_hash`, `KvEventLog` from `events`, and from `adapters` the identity
of adapters, which is part of a page's identity. `block_events` has the form of such events in other projects. Nothing
here holds a page, and only `adapters` reads files.
"""
