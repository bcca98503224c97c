"""Defines what a backend of the shared store implements.

Calls block for as long as the storage takes and may be made from several threads at once. They raise OSError, or what
the backend's library raises; `StoreThreads` counts either as a failure of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

PARTIAL_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class StoredObject:
    name: str
    num_bytes: int
    used_s: float  # Unix time of the last use that the storage knows: of writing, or in a folder also of reading

    @property
    def is_partial(self) -> bool:
        """Returns whether its writer has not finished it, and may never do so."""
        return self.name.endswith(PARTIAL_SUFFIX)


class ObjectStore(Protocol):
    """Holds objects by name. A name consists of letters, digits, dots and single slashes."""

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        """Returns an object, cut off after `max_bytes`, or None if there is none."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Writes or replaces an object as a whole: no reader ever sees a part of it."""

    def delete(self, name: str) -> None:
        """Deletes an object, if it is there."""

    def list(self, folder: str) -> Iterator[StoredObject]:
        """Iterates over the objects below a folder, which need not exist."""
