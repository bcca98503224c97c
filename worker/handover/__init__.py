"""Hands cached pages of a draining worker over to the prefix caches of other workers.

`policy` decides which pages go where; `source` and `client` push them, `service` and `intake` receive them. Others take
`HandoverService` and its parts from here to compose a worker. Nothing here knows requests: a page that is handed over
is full, cached and never written again.
"""
