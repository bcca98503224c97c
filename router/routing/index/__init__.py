"""The prefix index: which worker's prefix cache holds which page, and on which tier.

Others use `prefix_index.PrefixIndex` and `prefix_match.PrefixMatch`; the fleet feeds the index KV events and calls its
`tidy`. One integer per page says which workers hold it (`page_masks`), and `worker_pages` keeps the order in which each
worker's pages are evicted. The room is pure; it must not know requests, costs or policies.
"""
