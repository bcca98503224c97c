"""Settings of the store through which workers of many hosts share cached pages."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from penstock.config.base import FrozenConfig
from penstock.config.engine import EngineConfig


class KvStoreConfig(FrozenConfig):
    """Lets workers share cached pages through a folder or a bucket, beyond the life of any of them."""

    url: str
    """Where pages are kept: `file:///shared/kv` for a folder that the hosts share, `s3://bucket/prefix`, or another URL
    that an installed library of fsspec knows. Credentials come from the environment or the library's own files."""
    endpoint: str = ""
    """URL of a service that speaks the protocol of S3; by default Amazon's."""
    max_bytes: int = Field(64 << 30, ge=1 << 20)
    """Bytes in the store, of all models together; beyond that, the least recently used pages are deleted."""
    write: Literal["reused", "computed", "never"] = "reused"
    """Which pages are written: those of a prefix that a second request begins with or that a hint pins, all that are
    computed, or none."""
    queue_bytes: int = Field(256 << 20, ge=1 << 20)
    """Bytes of pages that wait in memory to be written; further ones are not written."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds within which the storage answers one call; after three late or failed calls in a row, the store is not
    used for a while.
    """
    listing_s: float = Field(10.0, gt=0)
    """Seconds between two listings, by which a worker learns what others have written."""

    @model_validator(mode="after")
    def _check_url(self) -> KvStoreConfig:
        parts = urlsplit(self.url)
        if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
            raise ValueError(f"kv_store.url = {self.url!r} is not a path on this host; give file:/// and a whole path")
        if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
            raise ValueError(
                f"kv_store.url = {self.url!r} has no location; give file:///shared/kv, s3://bucket/prefix or the like"
            )
        if parts.password is not None or "@" in parts.netloc or parts.query:
            raise ValueError(
                "kv_store.url holds credentials or options; leave them out, and put credentials into the environment "
                "or the library's own files, such as AWS_PROFILE and ~/.aws/credentials"
            )
        if self.endpoint and parts.scheme not in ("s3", "s3a"):
            raise ValueError(f"kv_store.endpoint = {self.endpoint!r} applies only to s3:// URLs; leave it out")
        return self

    def check_engine(self, engine: EngineConfig) -> None:
        """Raises ValueError for an engine whose pages cannot be shared."""
        if not engine.prefix_caching:
            raise ValueError(
                "kv_store shares the pages of the prefix cache, which engine.prefix_caching = false turns off; turn it "
                "on, or leave kv_store out"
            )
        if engine.tensor_parallel > 1:
            raise ValueError(
                f"kv_store shares the pages of one process, but engine.tensor_parallel = {engine.tensor_parallel} runs "
                "several; set it to 1, or leave kv_store out"
            )
