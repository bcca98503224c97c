"""Opens the backend that a URL names. fsspec is imported only where it is needed."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.config.kv_store import KvStoreConfig
from worker.pull.store.backends.folder_store import FolderStore
from worker.pull.store.backends.fsspec_store import FsspecStore
from worker.pull.store.backends.object_store import ObjectStore


def open_store(config: KvStoreConfig) -> ObjectStore:
    """Opens the store that a URL names. Blocks. Raises ConfigError if this worker cannot use it."""
    if urlsplit(config.url).scheme == "file":
        return FolderStore(urlsplit(config.url).path)
    return FsspecStore(config)
