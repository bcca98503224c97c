"""A store that workers of many hosts share: runs of cached pages as objects in a folder or a bucket.

`shared_pages` runs on the step loop: it says what the store holds of a prompt, reads it for `worker.pull.prompts`, and
chooses what is written. `store_threads` moves objects, `housekeeping` lists and bounds the store, `object_format` names
and checks objects, and `object_store` is what a backend can do: `folder_store` for folders, `fsspec_store` for others.
A shell takes `SharedPages` and `open_store`. The room knows nothing of requests; whatever fails here is a miss.
"""
