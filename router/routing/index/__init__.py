"""The prefix index: which worker's prefix cache holds which page, and on which tier.

Others take `prefix_index.PrefixIndex` and `prefix_match.PrefixMatch`; the fleet feeds it with KV events and runs
`tidy_runner`. One integer per page says who holds it (`page_masks`), and `worker_pages` keeps each worker's order of
eviction. Apart from the runner the room is pure; it must not know requests, costs or policies.
"""
