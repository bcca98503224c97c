"""Which worker's prefix cache holds which page, and on which tier: the router's picture of the workers' own.

Pure and synchronous. Owns nothing that the workers could not tell again: a gap in the events or a new incarnation of a
worker is answered by a snapshot. A worker that tells no events is known by what was sent there (`note`), for a while.

Memory is bounded over all workers: beyond `max_pages` the worker with the most pages loses leaves of its oldest ones,
except what requests have asked for of late. That, a snapshot and a leaving worker are worked off in bounded pieces: a
million pages that leave do not hold up the event loop, yet nobody is sent there from the first moment on.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config import IndexConfig
from penstock.kv_events import KvEvent, KvEventBatch, KvEventKind
from penstock.types import PageHash, WorkerId
from router.page_holder import Holder
from router.page_masks import Losses, PageMasks, bisect_masks, scan_masks
from router.prefix_match import BitNames, PrefixMatch

DEFAULT_CONFIG = IndexConfig()
_KEY_BYTES = 64  # of a page hash as an object
_TIDY_PAGES = 2048  # looked at in one call, some 0.5 ms
_TIGHT_SHARE = 0.8  # of max_pages, from which on it is remembered what is new and what requests ask for
_TTL_PARTS = 8  # a page noted lives this many parts of its time, and at most one more


@dataclass(slots=True)
class IndexStats:
    """Counts since the router started."""

    gaps: int = 0
    replays: int = 0  # gaps closed by the worker's window
    snapshots: int = 0
    evicted_pages: int = 0  # given up for want of room


class _Arriving(NamedTuple):
    """A snapshot of which some parts are here."""

    holder: Holder
    first_seq: int
    next_part: int


class PrefixIndex:
    """A worker joins with its first batch and leaves with `drop`."""

    def __init__(self, config: IndexConfig = DEFAULT_CONFIG, on_leaving: Callable[[], None] = lambda: None) -> None:
        """`on_leaving` is called when there is something to `tidy`."""
        self.stats = IndexStats()
        self._max_pages = config.max_pages
        self._ttl_s = config.approximate_ttl_s
        self._on_leaving = on_leaving
        self._masks = PageMasks()
        self._holders: dict[WorkerId, Holder] = {}
        self._arriving: dict[WorkerId, _Arriving] = {}
        self._leaving: deque[Holder] = deque()
        self._names = BitNames()
        self._live = 0  # bits of those in `_holders`
        self._sure = 0  # of these, bits of those without strays
        self._num_entries = 0  # invariant: the sum over all holders, leaving and arriving ones included
        self._asked: set[PageHash] = set()  # by requests, of late

    # ---- what is known -------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Distinct pages known, those of workers that have just left among them."""
        return len(self._masks.masks)

    @property
    def num_bytes(self) -> int:
        """Of memory: tables as they are, keys by their number."""
        tables = sum(sys.getsizeof(one.pages) for holder in self._all_holders() for one in holder.generations)
        return tables + sys.getsizeof(self._masks.masks) + _KEY_BYTES * self._num_entries

    @property
    def worker_ids(self) -> list[WorkerId]:
        return list(self._holders)

    def pages_of(self, worker_id: WorkerId) -> int:
        return sum(self.pages_by_tier(worker_id))

    def pages_by_tier(self, worker_id: WorkerId) -> tuple[int, int, int]:
        """On the device, on the host, on disk; each page on the best tier that has it."""
        holder = self._holders.get(worker_id)
        device, host, disk = holder.num_by_rank if holder else (0, 0, 0)
        return device, host, disk

    def next_seq(self, worker_id: WorkerId) -> int:
        """The first event of this worker that is not applied yet; 0 where it is not known."""
        holder = self._holders.get(worker_id)
        return holder.next_seq if holder else 0

    def match(self, hashes: Sequence[PageHash]) -> Mapping[WorkerId, PrefixMatch]:
        """How much of a prompt each worker holds, without a hole; workers that hold none of it are left out."""
        get = self._masks.masks.get
        alive = get(hashes[0], 0) & self._live if hashes else 0
        losses: Losses = []
        if sure := alive & self._sure:
            bisect_masks(get, hashes, sure, losses)
        if unsure := alive & ~self._sure:
            scan_masks(get, hashes, 0, unsure, losses)
        if alive and self._is_tight:
            self._keep(hashes[: max(depth for _, depth in losses)])
        return self._names.read(losses)

    @property
    def _is_tight(self) -> bool:
        return self._num_entries > _TIGHT_SHARE * self._max_pages

    def _keep(self, hashes: Sequence[PageHash]) -> None:
        if len(self._asked) > self._max_pages // 8:
            self._asked.clear()
        self._asked.update(hashes)

    # ---- what workers tell ---------------------------------------------------------------------------------------

    def apply(self, worker_id: WorkerId, batch: KvEventBatch) -> bool:
        """Applies what is new in a batch. False on a gap: nothing is applied, and `next_seq` says from where to ask."""
        holder = self._holders.get(worker_id) or self._join(worker_id)
        if batch.snapshot:
            return self._apply_snapshot(worker_id, batch)
        expected = holder.next_seq or 1  # the first events of a worker's life need no snapshot
        if batch.first_seq > expected:
            return self._missed(holder)
        if batch.next_seq > expected:
            # Whole, even where its beginning is known: an event says where pages are, and saying it twice is harmless.
            self._put(holder, batch.events)
            self._set_sure(holder, batch.num_strays)
        holder.next_seq = max(expected, batch.next_seq)
        self.stats.replays += holder.in_gap
        holder.in_gap = False
        self._bound()
        return True

    def _missed(self, holder: Holder) -> bool:
        self.stats.gaps += not holder.in_gap
        holder.in_gap = True
        return False

    def _apply_snapshot(self, worker_id: WorkerId, batch: KvEventBatch) -> bool:
        """What is known stays in force until the snapshot is whole."""
        if batch.part == 0:
            self._discard_arriving(worker_id)
            self._arriving[worker_id] = _Arriving(self._new_holder(worker_id), batch.first_seq, 0)
        arriving = self._arriving.get(worker_id)
        if arriving is None or (batch.first_seq, batch.part) != (arriving.first_seq, arriving.next_part):
            return self._missed(self._holders[worker_id])
        holder = arriving.holder
        self._put(holder, batch.events)
        if batch.more:
            self._arriving[worker_id] = arriving._replace(next_part=batch.part + 1)
        else:
            del self._arriving[worker_id]
            holder.next_seq = batch.next_seq
            self._retire(self._holders[worker_id])
            self._enlist(worker_id, holder)
            self._set_sure(holder, batch.num_strays)
            self.stats.snapshots += 1
        self._bound()
        return True

    def drop(self, worker_id: WorkerId) -> None:
        """The worker has left or was born anew: nothing that it held is matched from here on."""
        self._discard_arriving(worker_id)
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._retire(holder)
            self.tidy()

    def _put(self, holder: Holder, events: Sequence[KvEvent]) -> None:
        before = holder.num_entries
        if self._is_tight and 2 * len(holder.generations[-1].pages) >= before:
            holder.begin_generation(holder.generations[-1].started_s)  # what is new shall not be the first to go
        for kind, hashes in events:
            holder.put(hashes, kind.rank)
        self._num_entries += holder.num_entries - before

    def _set_sure(self, holder: Holder, num_strays: int | None) -> None:
        if num_strays == 0 and not holder.is_thinned and self._live & holder.bits:
            self._sure |= holder.bits
        else:
            self._sure &= ~holder.bits

    # ---- what was sent to workers that tell nothing --------------------------------------------------------------

    def note(self, worker_id: WorkerId, hashes: Sequence[PageHash], now_s: float) -> None:
        """A prompt, from its first page on, was sent to a worker that tells no events: it will hold the pages."""
        holder = self._holders.get(worker_id) or self._join(worker_id)
        holder.is_noted = True
        self._set_sure(holder, 0)  # a prompt is noted with all that it hangs from, and forgotten leaves first
        if now_s >= holder.generations[-1].started_s + self._ttl_s / _TTL_PARTS:
            holder.begin_generation(now_s)
        self._put(holder, [KvEvent(KvEventKind.STORED, tuple(hashes))])
        self._bound()

    def _expire(self, now_s: float, max_pages: int) -> bool:
        """Whether there is more to forget."""
        oldest_s = now_s - self._ttl_s * (1 + 1 / _TTL_PARTS)
        for holder in self._holders.values():
            while holder.is_noted and holder.num_entries and holder.generations[0].started_s <= oldest_s:
                if max_pages <= 0:
                    return True
                max_pages -= self._give_up(holder, max_pages)
        return False

    # ---- room ----------------------------------------------------------------------------------------------------

    def tidy(self, now_s: float | None = None, max_pages: int = _TIDY_PAGES) -> bool:
        """Forgets some pages of workers that have left, and of those noted too long ago. Whether there are more."""
        while self._leaving and max_pages > 0:
            holder = self._leaving[0]
            max_pages -= self._give_up(holder, max_pages)
            if not holder.num_entries:
                self._leaving.popleft()
                self._names.free_slot(holder.slot)
        more = now_s is not None and self._expire(now_s, max_pages)
        return more or bool(self._leaving)

    def _give_up(self, holder: Holder, max_pages: int, kept: set[PageHash] | None = None) -> int:
        before = holder.num_entries
        num_seen = holder.give_up(max_pages, kept)
        self._num_entries += holder.num_entries - before
        return num_seen

    def _bound(self) -> None:
        """Back to `max_pages`; looks at a few times the pages that are too many."""
        if self._leaving:
            self.tidy()
        budget = 4 * (self._num_entries - self._max_pages)
        while (excess := self._num_entries - self._max_pages) > 0:
            if self._leaving:
                self.tidy(max_pages=excess)
                continue
            holder = max(self._all_holders(), key=lambda one: one.num_entries)
            holder.is_thinned = True
            self._sure &= ~holder.bits
            before = self._num_entries
            seen = self._give_up(holder, excess, self._asked if budget > 0 else None)
            budget -= seen
            self.stats.evicted_pages += before - self._num_entries

    # ---- workers -------------------------------------------------------------------------------------------------

    def _join(self, worker_id: WorkerId) -> Holder:
        holder = self._new_holder(worker_id)
        self._enlist(worker_id, holder)
        return holder

    def _new_holder(self, worker_id: WorkerId) -> Holder:
        return Holder(self._names.take_slot(worker_id), self._masks)

    def _enlist(self, worker_id: WorkerId, holder: Holder) -> None:
        self._holders[worker_id] = holder
        self._live |= holder.bits

    def _retire(self, holder: Holder) -> None:
        self._live &= ~holder.bits
        self._sure &= ~holder.bits
        self._leaving.append(holder)
        self._on_leaving()

    def _discard_arriving(self, worker_id: WorkerId) -> None:
        arriving = self._arriving.pop(worker_id, None)
        if arriving is not None:
            self._retire(arriving.holder)

    def _all_holders(self) -> list[Holder]:
        return [*self._holders.values(), *self._leaving, *(one.holder for one in self._arriving.values())]

    def check_integrity(self) -> None:
        """Raises AssertionError where the index disagrees with itself. Looks at everything."""
        holders = self._all_holders()
        for holder in holders:
            holder.check_integrity()
        everyone = sum(holder.bits for holder in holders)
        assert all(mask and not mask & ~everyone for mask in self._masks.masks.values()), "a page is nobody's"
        assert self._live == sum(holder.bits for holder in self._holders.values()), "the wrong workers are matched"
        assert self._num_entries == sum(holder.num_entries for holder in holders), "entries are counted wrong"
