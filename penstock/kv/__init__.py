"""The names of KV pages and the events that inform routers where pages are cached. Shared by routers and workers.

Others take `hash_pages` and `make_salt` from `page_hash`, `KvEventLog` from `events`, and the identity of adapters,
which is a part of a page's, from `adapters`. Nothing here holds a page; only `adapters` reads files.
"""
