"""Tracks which worker's prefix cache holds which page, and on which tier.

Pure and synchronous. Workers can report everything again that the index holds: a snapshot repairs a gap in a worker's
events and replaces the pages of an earlier epoch. For a worker without events, the index remembers for a while which
prompts were sent to it (`note`).

Memory is bounded over all workers: beyond `max_pages`, pages of the worker with the most are evicted, oldest first and
leaves before their parents, except pages that requests have looked up recently. Evictions and the pages of replaced
snapshots and lost workers are processed in bounded pieces, so that removing a million pages does not block the event
loop; requests stop matching them at once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config import IndexConfig
from penstock.kv.events import KvEvent, KvEventBatch, KvEventKind
from penstock.types import PageHash, WorkerId
from router.routing.index.page_masks import Losses, PageMasks, bisect_masks, scan_masks
from router.routing.index.prefix_match import MaskSlots, PrefixMatch
from router.routing.index.worker_pages import WorkerPages

DEFAULT_CONFIG = IndexConfig()
_KEY_BYTES = 64  # memory of one page hash
_TIDY_PAGES = 2048  # examined in one call, some 0.5 ms
_TIGHT_SHARE = 0.8  # share of max_pages beyond which new pages and pages that requests look up are protected
_TTL_PARTS = 8  # generations of noted pages in a lifetime; pages expire by generation, so up to one part late


@dataclass(slots=True)
class IndexStats:
    """Counts since the router started."""

    gaps: int = 0
    replays: int = 0  # gaps closed by events that the worker sent again
    snapshots: int = 0
    evicted_pages: int = 0  # evicted to stay within `max_pages`


class _PartialSnapshot(NamedTuple):
    """A snapshot whose first parts have arrived."""

    pages: WorkerPages
    first_seq: int
    next_part: int


class PrefixIndex:
    """Follows the workers' caches. A worker joins with its first batch and leaves with `drop`."""

    def __init__(self, config: IndexConfig = DEFAULT_CONFIG, on_leaving: Callable[[], None] = lambda: None) -> None:
        """`on_leaving` is called when pages wait to be removed by `tidy`."""
        self.stats = IndexStats()
        self._max_pages = config.max_pages
        self._ttl_s = config.approximate_ttl_s
        self._on_leaving = on_leaving
        self._masks = PageMasks()
        self._workers: dict[WorkerId, WorkerPages] = {}
        self._snapshots: dict[WorkerId, _PartialSnapshot] = {}
        self._leaving: deque[WorkerPages] = deque()
        self._slots = MaskSlots()
        self._live = 0  # bits of `_workers`
        self._sure = 0  # bits of workers without strays; a subset of `_live`
        self._num_entries = 0  # invariant: the sum over workers, leaving workers and partial snapshots
        self._recent: set[PageHash] = set()  # pages that requests have looked up recently

    # ---- lookups -------------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """The number of distinct pages known, including pages of leaving workers that are not removed yet."""
        return len(self._masks.masks)

    @property
    def num_bytes(self) -> int:
        """The estimated memory: the tables' sizes, and a fixed size for each key."""
        tables = sum(sys.getsizeof(part.pages) for pages in self._all_pages() for part in pages.generations)
        return tables + sys.getsizeof(self._masks.masks) + _KEY_BYTES * self._num_entries

    @property
    def worker_ids(self) -> list[WorkerId]:
        return list(self._workers)

    def pages_of(self, worker_id: WorkerId) -> int:
        return sum(self.pages_by_tier(worker_id))

    def pages_by_tier(self, worker_id: WorkerId) -> tuple[int, int, int]:
        """Returns the number of pages on the device, the host and disk; each page counts only on its best tier."""
        pages = self._workers.get(worker_id)
        device, host, disk = pages.num_by_rank if pages else (0, 0, 0)
        return device, host, disk

    def next_seq(self, worker_id: WorkerId) -> int:
        """Returns the number of the worker's first event that is not applied yet; 0 for an unknown worker."""
        pages = self._workers.get(worker_id)
        return pages.next_seq if pages else 0

    def match(self, hashes: Sequence[PageHash]) -> Mapping[WorkerId, PrefixMatch]:
        """Returns how many leading pages of a prompt each worker holds; leaves out workers without the first page."""
        get = self._masks.masks.get
        alive = get(hashes[0], 0) & self._live if hashes else 0
        losses: Losses = []
        if sure := alive & self._sure:
            bisect_masks(get, hashes, sure, losses)
        if unsure := alive & ~self._sure:
            scan_masks(get, hashes, 0, unsure, losses)
        if alive and self._is_tight:
            self._protect(hashes[: max(depth for _, depth in losses)])
        return self._slots.matches(losses)

    @property
    def _is_tight(self) -> bool:
        return self._num_entries > _TIGHT_SHARE * self._max_pages

    def _protect(self, hashes: Sequence[PageHash]) -> None:
        if len(self._recent) > self._max_pages // 8:
            self._recent.clear()
        self._recent.update(hashes)

    # ---- events from workers -------------------------------------------------------------------------------------

    def apply(self, worker_id: WorkerId, batch: KvEventBatch) -> bool:
        """Applies a batch of events. Returns False on a gap: nothing is applied; request events from `next_seq` on."""
        pages = self._workers.get(worker_id) or self._join(worker_id)
        if batch.snapshot:
            return self._apply_snapshot(worker_id, batch)
        expected = pages.next_seq or 1  # the first events of a worker's life need no snapshot
        if batch.first_seq > expected:
            return self._miss(pages)
        if batch.next_seq > expected:
            # Applies the whole batch, even if its beginning is known: an event says where pages are, so a repeat is
            # harmless.
            self._put(pages, batch.events)
            self._set_sure(pages, batch.num_strays)
        pages.next_seq = max(expected, batch.next_seq)
        self.stats.replays += pages.in_gap
        pages.in_gap = False
        self._bound()
        return True

    def _miss(self, pages: WorkerPages) -> bool:
        self.stats.gaps += not pages.in_gap
        pages.in_gap = True
        return False

    def _apply_snapshot(self, worker_id: WorkerId, batch: KvEventBatch) -> bool:
        """Applies a part of a snapshot. Requests match the known pages until the snapshot is complete."""
        if batch.part == 0:
            self._discard_snapshot(worker_id)
            self._snapshots[worker_id] = _PartialSnapshot(self._new_pages(worker_id), batch.first_seq, 0)
        partial = self._snapshots.get(worker_id)
        if partial is None or (batch.first_seq, batch.part) != (partial.first_seq, partial.next_part):
            return self._miss(self._workers[worker_id])
        pages = partial.pages
        self._put(pages, batch.events)
        if batch.more:
            self._snapshots[worker_id] = partial._replace(next_part=batch.part + 1)
        else:
            del self._snapshots[worker_id]
            pages.next_seq = batch.next_seq
            self._retire(self._workers[worker_id])
            self._enlist(worker_id, pages)
            self._set_sure(pages, batch.num_strays)
            self.stats.snapshots += 1
        self._bound()
        return True

    def drop(self, worker_id: WorkerId) -> None:
        """Forgets a worker that has left or restarted. No request matches its pages any more; `tidy` removes them."""
        self._discard_snapshot(worker_id)
        pages = self._workers.pop(worker_id, None)
        if pages is not None:
            self._retire(pages)
            self.tidy()

    def _put(self, pages: WorkerPages, events: Sequence[KvEvent]) -> None:
        before = pages.num_entries
        if self._is_tight and 2 * len(pages.generations[-1].pages) >= before:
            pages.begin_generation(pages.generations[-1].started_s)  # so that new pages are not evicted first
        for kind, hashes in events:
            pages.put(hashes, kind.rank)
        self._num_entries += pages.num_entries - before

    def _set_sure(self, pages: WorkerPages, num_strays: int | None) -> None:
        if num_strays == 0 and not pages.is_thinned and self._live & pages.bits:
            self._sure |= pages.bits
        else:
            self._sure &= ~pages.bits

    # ---- workers without events ----------------------------------------------------------------------------------

    def note(self, worker_id: WorkerId, hashes: Sequence[PageHash], now_s: float) -> None:
        """Records the leading pages of a prompt that is sent to a worker without events, which will cache them."""
        pages = self._workers.get(worker_id) or self._join(worker_id)
        pages.is_noted = True
        self._set_sure(pages, 0)  # a page is noted together with its parents, and leaves are evicted first
        if now_s >= pages.generations[-1].started_s + self._ttl_s / _TTL_PARTS:
            pages.begin_generation(now_s)
        self._put(pages, [KvEvent(KvEventKind.STORED, tuple(hashes))])
        self._bound()

    def _expire(self, now_s: float, max_pages: int) -> bool:
        """Forgets noted pages past their lifetime, `max_pages` at most. Returns whether more are left."""
        oldest_s = now_s - self._ttl_s * (1 + 1 / _TTL_PARTS)
        for pages in self._workers.values():
            while pages.is_noted and pages.num_entries and pages.generations[0].started_s <= oldest_s:
                if max_pages <= 0:
                    return True
                max_pages -= self._evict(pages, max_pages)
        return False

    # ---- eviction ------------------------------------------------------------------------------------------------

    def tidy(self, now_s: float | None = None, max_pages: int = _TIDY_PAGES) -> bool:
        """Removes some pages of workers that have left and, given the time, some noted pages past their lifetime.

        Returns whether more are left.
        """
        while self._leaving and max_pages > 0:
            pages = self._leaving[0]
            max_pages -= self._evict(pages, max_pages)
            if not pages.num_entries:
                self._leaving.popleft()
                self._slots.free(pages.slot)
        more = now_s is not None and self._expire(now_s, max_pages)
        return more or bool(self._leaving)

    def _evict(self, pages: WorkerPages, max_pages: int, kept: set[PageHash] | None = None) -> int:
        before = pages.num_entries
        num_seen = pages.evict(max_pages, kept)
        self._num_entries += pages.num_entries - before
        return num_seen

    def _bound(self) -> None:
        """Evicts down to `max_pages`. Spares recent pages until it has examined four times the excess."""
        if self._leaving:
            self.tidy()
        budget = 4 * (self._num_entries - self._max_pages)
        while (excess := self._num_entries - self._max_pages) > 0:
            if self._leaving:
                self.tidy(max_pages=excess)
                continue
            pages = max(self._all_pages(), key=lambda pages: pages.num_entries)
            pages.is_thinned = True
            self._sure &= ~pages.bits
            before = self._num_entries
            budget -= self._evict(pages, excess, self._recent if budget > 0 else None)
            self.stats.evicted_pages += before - self._num_entries

    # ---- workers -------------------------------------------------------------------------------------------------

    def _join(self, worker_id: WorkerId) -> WorkerPages:
        pages = self._new_pages(worker_id)
        self._enlist(worker_id, pages)
        return pages

    def _new_pages(self, worker_id: WorkerId) -> WorkerPages:
        return WorkerPages(self._slots.assign(worker_id), self._masks)

    def _enlist(self, worker_id: WorkerId, pages: WorkerPages) -> None:
        self._workers[worker_id] = pages
        self._live |= pages.bits

    def _retire(self, pages: WorkerPages) -> None:
        self._live &= ~pages.bits
        self._sure &= ~pages.bits
        self._leaving.append(pages)
        self._on_leaving()

    def _discard_snapshot(self, worker_id: WorkerId) -> None:
        partial = self._snapshots.pop(worker_id, None)
        if partial is not None:
            self._retire(partial.pages)

    def _all_pages(self) -> list[WorkerPages]:
        return [*self._workers.values(), *self._leaving, *(partial.pages for partial in self._snapshots.values())]

    def check_integrity(self) -> None:
        """Raises AssertionError if the index is inconsistent. Examines every page."""
        everyone = self._all_pages()
        for pages in everyone:
            pages.check_integrity()
        all_bits = sum(pages.bits for pages in everyone)
        assert all(mask and not mask & ~all_bits for mask in self._masks.masks.values()), "a page has no holder"
        assert self._live == sum(pages.bits for pages in self._workers.values()), "the wrong workers are matched"
        num_entries = sum(pages.num_entries for pages in everyone)
        assert self._num_entries == num_entries, "the count of entries is wrong"
