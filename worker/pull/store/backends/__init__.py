"""Holds the places that a shared store may be in: folders, and what fsspec reaches, such as buckets.

`object_store` defines what a backend can do, `folder_store` and `fsspec_store` do it, and `opening` chooses one by its
URL. The room knows nothing of pages: it moves named objects.
"""
