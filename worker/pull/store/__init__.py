"""Keeps runs of cached pages as objects in a store that workers of many hosts share: a folder or a bucket.

`shared_pages` runs on the step loop: it finds out what the store holds of a prompt, reads that for
`worker.pull.prompts`, and chooses what to write. `store_threads` moves objects, `housekeeping` lists and bounds the
store, `object_format` names and checks objects, and `object_store` is what a backend can do: `folder_store` for
folders, `fsspec_store` for others. A shell takes `SharedPages` and `open_store`. The room knows nothing of requests;
anything that fails here counts as a miss.
"""
