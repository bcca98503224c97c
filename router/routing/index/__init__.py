"""The prefix index: which worker's prefix cache holds which page, and on which tier.

Others take `prefix_index.PrefixIndex` and `prefix_match.PrefixMatch`; the fleet feeds it KV events and has it tidied.
One integer per page says who holds it (`page_masks`), and `worker_pages` keeps each worker's order of eviction. The
room is pure; it must not know requests, costs or policies.
"""
