"""Keeps what a worker knows of the shared store, from the last listing and from its own writes since. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.types import PageHash
from worker.pull.store.object_format import RunFormat

_MAX_REFUSED = 10_000


class KnownRuns:
    """Keeps the last pages of the objects of one folder, and forgets them when the folder changes. Used on the step
    loop.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._listed: frozenset[PageHash] = frozenset()
        self._written: dict[PageHash, float] = {}  # by this worker: when
        self._pending: set[PageHash] = set()  # in the queue
        self._gone: set[PageHash] = set()  # listed, but missing when they were read
        self._refused: set[PageHash] = set()  # present, but unusable until they are written again

    def holds(self, form: RunFormat, last: PageHash) -> bool:
        """Returns whether a run is stored or about to be."""
        self._turn_to(form.folder)
        return last in self._pending or self._is_stored(last)

    def _is_stored(self, last: PageHash) -> bool:
        if last in self._written:
            return True
        return last in self._listed and last not in self._gone and last not in self._refused

    def num_leading(
        self,
        form: RunFormat,
        hashes: Sequence[PageHash],
        num_here: int,
        first_needed: Callable[[int], int] | None,
    ) -> int:
        """Returns how many leading pages of a prompt the worker would have after reading the store; it has `num_here`
        now.

        `first_needed` returns, in a model with a window, the first page that is needed of a prefix of that many pages.
        """
        self._turn_to(form.folder)
        size, start = form.run_pages, num_here // form.run_pages
        stop = len(hashes) // size
        if first_needed is None:
            for run in range(start, stop):
                if not self._is_stored(hashes[(run + 1) * size - 1]):
                    return run * size
            return stop * size
        stored = [self._is_stored(hashes[(run + 1) * size - 1]) for run in range(stop)]
        for end in range(stop, start, -1):
            first = max(num_here, first_needed(end * size)) // size
            if all(stored[first:end]):
                return end * size
        return start * size

    def add_pending(self, form: RunFormat, last: PageHash) -> None:
        self._turn_to(form.folder)
        self._pending.add(last)

    def end_pending(self, form: RunFormat, last: PageHash, *, is_stored: bool, now_s: float) -> None:
        if form.folder != self._folder:
            return
        self._pending.discard(last)
        if is_stored:
            self._written[last] = now_s
            self._refused.discard(last)
            self._gone.discard(last)

    def discard(self, last: PageHash) -> None:
        """Records that an object no longer exists."""
        self._written.pop(last, None)
        self._gone.add(last)

    def refuse(self, last: PageHash) -> None:
        """Records that an object is unusable, so that it is written again when its pages are."""
        self._written.pop(last, None)
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused.add(last)

    def on_listed(self, folder: str, listed: frozenset[PageHash], begun_s: float) -> None:
        """Takes a listing, which contains everything that was written before it began."""
        self._turn_to(folder)
        self._listed = listed
        self._gone.clear()
        self._written = {last: at_s for last, at_s in self._written.items() if at_s >= begun_s}

    def _turn_to(self, folder: str) -> None:
        if folder != self._folder:
            self._folder, self._listed = folder, frozenset()
            for known in (self._written, self._pending, self._gone, self._refused):
                known.clear()
