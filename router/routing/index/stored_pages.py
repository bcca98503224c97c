"""Keeps which runs of pages shared stores hold, as workers report them. Pure.

A store holds prompts in runs of a fixed number of pages, each named by the hash of its last page. Any worker of the
store's layout may read them, so they are no worker's pages and take no place in the prefix index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.types import PageHash

_MAX_RUNS = 500_000  # of one store, as many as a worker remembers: about 50 MB
_NO_RUNS: frozenset[PageHash] = frozenset()


class StoreKey(NamedTuple):
    """Identifies the objects that workers of one layout share in one store."""

    url: str
    layout_digest: str
    run_pages: int  # pages of one object


class StoredPages:
    """Holds the runs of every store that a worker reports."""

    def __init__(self) -> None:
        self._runs: dict[StoreKey, set[PageHash]] = {}

    def runs(self, store: StoreKey) -> Collection[PageHash]:
        """Returns the last pages of the runs in a store."""
        return self._runs.get(store, _NO_RUNS)

    def apply(self, store: StoreKey, added: Iterable[PageHash], removed: Iterable[PageHash]) -> None:
        runs = self._runs.setdefault(store, set())
        runs.difference_update(removed)
        for page in added:
            if len(runs) >= _MAX_RUNS:
                break
            runs.add(page)

    def drop(self, store: StoreKey) -> None:
        """Forgets what a store holds, because the worker that reported it is lost."""
        self._runs.pop(store, None)
