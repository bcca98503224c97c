"""Which worker's prefix cache holds which page: the router's picture of the workers' own, fed by their KV events.

Pure and synchronous. Owns nothing that the workers could not tell again: a gap in the events or a new incarnation of a
worker is answered by a snapshot. One integer a page holds its workers, a bit each, so that one walk over a prompt's
page hashes finds every worker's longest prefix at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.kv_events import KvEvent, KvEventBatch, KvEventKind
from penstock.types import PageHash, WorkerId

MAX_PAGES_PER_WORKER = 4_000_000  # about 0.7 GB here; a worker that tells of more is believed so far only


class PrefixMatch(NamedTuple):
    """Leading pages of a prompt that one worker holds; those after the device's and the host's are on its disk."""

    num_pages: int
    num_device_pages: int
    num_host_pages: int = 0  # that follow those on the device

    @property
    def num_disk_pages(self) -> int:
        return self.num_pages - self.num_device_pages - self.num_host_pages


@dataclass(slots=True)
class _Holder:
    """One worker's pages."""

    bit: int
    next_seq: int = 0  # the first event wanted; 0: nothing seen yet, which a snapshot mends
    pages: set[PageHash] = field(default_factory=set)
    num_ignored: int = 0  # stored pages beyond the limit


class PrefixIndex:
    """A worker joins with its first batch and leaves with `drop`."""

    def __init__(self, max_pages_per_worker: int = MAX_PAGES_PER_WORKER) -> None:
        self._max_pages = max_pages_per_worker
        self._workers_by_page: dict[PageHash, int] = {}
        self._holders: dict[WorkerId, _Holder] = {}
        self._worker_by_bit: dict[int, WorkerId] = {}

    @property
    def num_pages(self) -> int:
        """Distinct pages known."""
        return len(self._workers_by_page)

    def pages_of(self, worker_id: WorkerId) -> int:
        holder = self._holders.get(worker_id)
        return len(holder.pages) if holder else 0

    def next_seq(self, worker_id: WorkerId) -> int:
        """The first event of this worker that is not applied yet; 0 where it is not known."""
        holder = self._holders.get(worker_id)
        return holder.next_seq if holder else 0

    def apply(self, worker_id: WorkerId, batch: KvEventBatch) -> bool:
        """Applies what is new in a batch. False on a gap: nothing is applied, and `next_seq` says from where to ask."""
        holder = self._holders.get(worker_id) or self._join(worker_id)
        if batch.snapshot:
            self._remove(holder, tuple(holder.pages))
            holder.next_seq = 0
            events = batch.events
        else:
            expected = holder.next_seq or 1  # the first events of a worker's life need no snapshot
            if batch.first_seq > expected:
                return False
            events = batch.events[expected - batch.first_seq :]
        for event in events:
            self._apply_event(holder, event)
        holder.next_seq = max(holder.next_seq, batch.next_seq)
        return True

    def drop(self, worker_id: WorkerId) -> None:
        """The worker has left or was born anew: all that it held is gone."""
        holder = self._holders.pop(worker_id, None)
        if holder is None:
            return
        self._remove(holder, tuple(holder.pages))
        del self._worker_by_bit[holder.bit]

    def match(self, hashes: Sequence[PageHash]) -> dict[WorkerId, PrefixMatch]:
        """Leading pages of a prompt that each worker holds, without a hole; workers that hold none are left out."""
        get = self._workers_by_page.get
        alive = get(hashes[0], 0) if hashes else 0
        depths: dict[WorkerId, PrefixMatch] = {}
        depth = 0
        for page in hashes:
            left = alive & get(page, 0)
            if left != alive:
                self._note(alive & ~left, depth, depths)
                alive = left
                if not alive:
                    return depths
            depth += 1
        self._note(alive, depth, depths)
        return depths

    def _note(self, bits: int, depth: int, depths: dict[WorkerId, PrefixMatch]) -> None:
        while bits:
            bit = bits & -bits
            depths[self._worker_by_bit[bit]] = PrefixMatch(depth, depth)
            bits ^= bit

    def _join(self, worker_id: WorkerId) -> _Holder:
        bit = 1
        while bit in self._worker_by_bit:
            bit <<= 1
        self._worker_by_bit[bit] = worker_id
        holder = self._holders[worker_id] = _Holder(bit)
        return holder

    def _apply_event(self, holder: _Holder, event: KvEvent) -> None:
        if event.kind is KvEventKind.REMOVED:
            self._remove(holder, event.hashes)
            return
        workers, pages, bit = self._workers_by_page, holder.pages, holder.bit
        for page in event.hashes:
            if page in pages:
                continue
            if len(pages) >= self._max_pages:
                holder.num_ignored += 1
                continue
            pages.add(page)
            workers[page] = workers.get(page, 0) | bit

    def _remove(self, holder: _Holder, hashes: Sequence[PageHash]) -> None:
        workers, pages, others = self._workers_by_page, holder.pages, ~holder.bit
        for page in hashes:
            if page not in pages:
                continue
            pages.remove(page)
            left = workers[page] & others
            if left:
                workers[page] = left
            else:
                del workers[page]

    def check_integrity(self) -> None:
        """Raises AssertionError where the two directions disagree."""
        expected: dict[PageHash, int] = {}
        for holder in self._holders.values():
            for page in holder.pages:
                expected[page] = expected.get(page, 0) | holder.bit
        assert expected == self._workers_by_page, "pages by worker and workers by page disagree"
