"""Keeps runs of cached pages as objects in a store that workers of many hosts share: a folder or a bucket.

`shared_pages` runs on the step loop: it finds out what the store holds of a prompt, reads that for
`worker.pull.prompts`, and chooses what to write. `store_threads` moves objects, `housekeeping` lists and bounds the
store, `announcer` reports to routers what it holds, `object_format` names and checks objects, and `backends` reach
folders and buckets. A shell takes `SharedPages` and `open_store`. The room knows nothing of requests; anything that
fails here counts as a miss.
"""
