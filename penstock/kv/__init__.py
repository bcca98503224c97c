"""The names of KV pages and the events that inform routers where pages are cached. Pure, shared by routers and workers.

Others take `hash_pages` and `make_salt` from `page_hash` and `KvEventLog` from `events`. Nothing here holds a page.
"""
