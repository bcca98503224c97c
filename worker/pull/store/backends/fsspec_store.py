"""Keeps objects in any storage that fsspec reaches: S3 and stores with its protocol, Google Cloud Storage, Azure, or
file systems such as HDFS and SFTP.

Object stores put an object as a whole; elsewhere it is written under another name and moved. Credentials come from the
environment and the files that the backend's library reads, never from the configuration.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from penstock.config.kv_store import KvStoreConfig
from penstock.errors import ConfigError
from worker.pull.store.backends.object_store import PARTIAL_SUFFIX, StoredObject

_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}  # a put appears as a whole or not at all
_OF_S3 = {"s3", "s3a"}
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


class FsspecStore:
    """Implements `ObjectStore`."""

    def __init__(self, config: KvStoreConfig) -> None:
        """Raises ConfigError if the backend's library is missing or refuses the URL."""
        scheme = urlsplit(config.url).scheme
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(config.url, **_options(scheme, config))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"kv_store.url = {config.url}: {error}; pip install 'penstock[store]', and for a scheme other than s3 "
                "the library that fsspec names"
            ) from error
        self._is_whole = scheme in _WHOLE

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        try:
            return memoryview(bytearray(self._files.cat_file(self._path(name), start=0, end=max_bytes)))
        except FileNotFoundError:
            return None

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path, content = self._path(name), b"".join(parts)
        if self._is_whole:
            self._files.pipe_file(path, content)
            return
        partial = f"{path}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(partial, content)
            self._files.mv(partial, path)
        except BaseException:
            with suppress(Exception):  # the failure that matters is the first one
                self._files.rm_file(partial)
            raise

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def list(self, folder: str) -> Iterator[StoredObject]:
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            yield StoredObject(path[len(self._root) :].lstrip("/"), int(info.get("size") or 0), _time_of(info))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _options(scheme: str, config: KvStoreConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": scheme != "memory"}
    if scheme in _OF_S3:
        options["config_kwargs"] = {
            "connect_timeout": config.timeout_s,
            "read_timeout": config.timeout_s,
            "retries": {"max_attempts": 1},
        }
        if config.endpoint:
            options["endpoint_url"] = config.endpoint
    return options


def _time_of(info: Mapping[str, Any]) -> float:
    """Returns when an object was last written, or 0 if the backend does not say."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
