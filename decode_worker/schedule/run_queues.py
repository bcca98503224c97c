"""Keeps a decode worker's running and waiting sequences in order of rank, and knows which running ones have a row.
Pure.

The decode scheduler owns it and decides which sequences change queues. A sequence keeps its rank for its whole life: by
arrival, with a head start for interactive over standard over bulk (`penstock.scheduling.lane_order`). Neither queue
holds a sequence whose pages are still coming from elsewhere, or one that is paused.

Bulk sequences wait in a queue of their own, and a running one is held back, without a row, until the scheduler releases
it. "Others" are the sequences of the other lanes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.step.row_table import RowTable
from engine.step.sequence import Sequence
from penstock.scheduling.lane_order import LaneOrder
from penstock.types import Lane

# The number of later arrivals that may go first.
HANDICAP_REQUESTS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 32, Lane.BULK: 256}


@dataclass(slots=True, eq=False)
class TrackedSequence:
    """A sequence and its scheduling state."""

    sequence: Sequence
    rank: tuple[float, int]  # lower ranks go first; the second number counts arrivals
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_preemptions: int = 0

    @property
    def is_bulk(self) -> bool:
        return self.sequence.lane is Lane.BULK


@dataclass(frozen=True, slots=True)
class BulkUse:
    """Counts what the tracked bulk sequences hold, which others may take, and what they have yet to compute."""

    num_sequences: int = 0
    num_pages: int = 0  # one that several share counts for each
    num_uncomputed_tokens: int = 0


class RunQueues:
    """Owns the tracked sequences and which are in `rows`. The lists are sorted by rank; others only read them."""

    def __init__(self, rows: RowTable, *, keeps_apart: bool = False) -> None:
        """Keeps prompts that are not bulk out of the steps of `rows` if `keeps_apart`: they are computed apart."""
        self._rows = rows
        self.keeps_apart = keeps_apart
        self._entries: dict[Sequence, TrackedSequence] = {}
        self._num_arrivals = 0
        self._aging = LaneOrder(HANDICAP_REQUESTS)
        self.running: list[TrackedSequence] = []
        self.rowless: list[TrackedSequence] = []  # running sequences that are new or computed in chunks
        self.apart: list[TrackedSequence] = []  # running sequences whose prompts are computed apart
        self.held: list[TrackedSequence] = []  # running bulk sequences that are held back
        self.waiting: list[TrackedSequence] = []  # others to be computed here
        self.waiting_bulk: list[TrackedSequence] = []
        self.num_bulk = 0  # in any state
        self.num_running_bulk = 0
        self._num_waiting_tokens = 0
        self._num_waiting_bulk_tokens = 0
        self._detached: set[TrackedSequence] = set()  # sequences in neither queue

    @property
    def num_uncomputed_tokens(self) -> int:
        """Returns how many tokens of prompts and preempted sequences this worker has yet to compute."""
        return self.num_uncomputed_tokens_of_others + self.num_uncomputed_bulk_tokens

    @property
    def num_uncomputed_bulk_tokens(self) -> int:
        running = (entry for entry in (*self.rowless, *self.held) if entry.is_bulk)
        return self._num_waiting_bulk_tokens + _num_uncomputed(running)

    @property
    def num_uncomputed_tokens_of_others(self) -> int:
        others = (entry for entry in self.rowless if not entry.is_bulk)
        return self._num_waiting_tokens + _num_uncomputed((*others, *self.apart))

    @property
    def bulk_use(self) -> BulkUse:
        if not self.num_bulk:
            return BulkUse()
        sequences = [entry.sequence for entry in self._entries.values() if entry.is_bulk]
        num_pages = sum([len(sequence.pages) - sequence.num_dropped for sequence in sequences])
        return BulkUse(len(sequences), num_pages, self.num_uncomputed_bulk_tokens)

    @property
    def num_running_others(self) -> int:
        return len(self.running) - self.num_running_bulk

    @property
    def has_bulk(self) -> bool:
        return bool(self.num_running_bulk or self.waiting_bulk)

    @property
    def has_others(self) -> bool:
        return bool(self.num_running_others or self.waiting)

    @property
    def num_holding(self) -> int:
        """Returns how many sequences hold pages: running, paused, or with a transfer in flight."""
        return len(self.running) + sum(1 for entry in self._detached if entry.sequence.pages)

    @property
    def waiting_for_chunks(self) -> Seq[TrackedSequence]:
        """Returns the waiting sequences that are not bulk, or none if those are computed apart."""
        return () if self.keeps_apart else self.waiting

    @property
    def num_rows_without_room(self) -> int:
        """Returns how many rows have no page for their next token yet."""
        return len(self._rows.without_room())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def __getitem__(self, sequence: Sequence) -> TrackedSequence:
        return self._entries[sequence]

    def is_running(self, sequence: Sequence) -> bool:
        """Returns whether it gets a token in every step that computes it: it runs, and all its tokens have KV here
        except the last one or those that its grammar has forced.
        """
        if sequence in self._rows:
            return True
        entry = self._entries.get(sequence)
        is_rowless = entry in self.rowless or entry in self.held
        return is_rowless and (sequence.num_uncomputed_tokens == 1 or sequence.is_fast_forwarding)

    def by_rank(self, sequences: Iterable[Sequence]) -> list[TrackedSequence]:
        return sorted((self._entries[sequence] for sequence in sequences), key=_rank)

    def waiting_before(self, sequence: Sequence, most: int) -> list[TrackedSequence]:
        """Returns the first waiting sequences that rank before `sequence`, at most so many. Others rank before bulk."""
        entry = self._entries[sequence]
        first = self.waiting if entry.is_bulk else []
        queue = self._waiting_queue(entry)
        num_before = bisect.bisect_left(queue, entry.rank, key=_rank)
        return [*first[:most], *queue[: min(num_before, max(0, most - len(first)))]]

    def behind(self, entry: TrackedSequence) -> list[TrackedSequence]:
        """Returns the running sequences that rank behind `entry`. Bulk ranks behind all others."""
        behind = self.running[bisect.bisect_right(self.running, entry.rank, key=_rank) :]
        if entry.is_bulk:
            return [each for each in behind if each.is_bulk]
        if self.num_running_bulk:
            return [each for each in self.running if each.is_bulk or each.rank > entry.rank]
        return behind

    def running_bulk(self) -> list[TrackedSequence]:
        return [entry for entry in self.running if entry.is_bulk] if self.num_running_bulk else []

    # Moves between queues.

    def track(self, sequence: Sequence) -> None:
        """Starts to track the sequence and gives it its rank."""
        self._num_arrivals += 1
        rank = (self._aging.rank(sequence.lane), self._num_arrivals)
        entry = self._entries[sequence] = TrackedSequence(sequence, rank)
        self._detached.add(entry)
        self.num_bulk += entry.is_bulk
        self._aging.advance(1)

    def forget(self, sequence: Sequence) -> bool:
        """Removes the sequence everywhere. Returns False if it is not tracked."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return False
        if _contains(self._waiting_queue(entry), entry):
            self._stop_waiting(entry)
        elif _contains(self.running, entry):
            self.stop(entry)
        self._detached.remove(entry)
        self.num_bulk -= entry.is_bulk
        return True

    def wait(self, entry: TrackedSequence) -> None:
        self._detached.remove(entry)
        bisect.insort(self._waiting_queue(entry), entry, key=_rank)
        self._count_waiting(entry, len(entry.sequence.token_ids))

    def _stop_waiting(self, entry: TrackedSequence) -> None:
        _remove(self._waiting_queue(entry), entry)
        self._count_waiting(entry, -len(entry.sequence.token_ids))
        self._detached.add(entry)

    def _waiting_queue(self, entry: TrackedSequence) -> list[TrackedSequence]:
        return self.waiting_bulk if entry.is_bulk else self.waiting

    def _count_waiting(self, entry: TrackedSequence, num_tokens: int) -> None:
        if entry.is_bulk:
            self._num_waiting_bulk_tokens += num_tokens
        else:
            self._num_waiting_tokens += num_tokens

    def admit(self, entry: TrackedSequence) -> None:
        """Turns a waiting sequence into a running one."""
        self._stop_waiting(entry)
        self.run(entry)

    def run(self, entry: TrackedSequence) -> None:
        self._detached.remove(entry)
        bisect.insort(self.running, entry, key=_rank)
        bisect.insort(self._queue_of(entry), entry, key=_rank)
        self.num_running_bulk += entry.is_bulk

    def _queue_of(self, entry: TrackedSequence) -> list[TrackedSequence]:
        """Returns the queue of a sequence that begins to run."""
        if entry.is_bulk:
            return self.held
        sequence = entry.sequence
        is_prompt = sequence.num_uncomputed_tokens > 1 and not sequence.is_fast_forwarding
        return self.apart if self.keeps_apart and is_prompt else self.rowless

    def stop(self, entry: TrackedSequence) -> None:
        """Takes a running sequence out of the queue and removes its row."""
        _remove(self.running, entry)
        self.num_running_bulk -= entry.is_bulk
        self._detached.add(entry)
        if not self._leave_step(entry):
            _remove(self.held, entry)

    def _leave_step(self, entry: TrackedSequence) -> bool:
        """Takes a running sequence out of the next steps. Returns False if it is held back."""
        if entry.sequence in self._rows:
            self._rows.remove(entry.sequence)
        elif _contains(self.rowless, entry):
            _remove(self.rowless, entry)
        elif _contains(self.apart, entry):
            _remove(self.apart, entry)
        else:
            return False
        return True

    def hold_back(self, entry: TrackedSequence) -> None:
        """Holds a running bulk sequence back until it is released; does nothing if it is held back already."""
        if self._leave_step(entry):
            bisect.insort(self.held, entry, key=_rank)

    def release(self, entry: TrackedSequence) -> None:
        """Lets a running bulk sequence take part in the next steps."""
        if _contains(self.held, entry):
            _remove(self.held, entry)
            bisect.insort(self.rowless, entry, key=_rank)

    def assign_rows(self, entries: Seq[TrackedSequence]) -> None:
        """Gives rows to sequences that decode from now on."""
        if entries:
            for entry in entries:
                self._rows.add(entry.sequence)
            self.rowless = [entry for entry in self.rowless if entry.sequence not in self._rows]

    def assign_awaiting_rows(self, places: Mapping[Sequence, int], step: int) -> None:
        """Gives rows to sequences whose next token the in-flight `step` samples, each at its place in the plan."""
        for sequence, place in places.items():
            self._rows.add_awaiting(sequence, step, place)
        if places:
            self.rowless = [entry for entry in self.rowless if entry.sequence not in places]

    def end_prompt(self, entry: TrackedSequence) -> None:
        """Lets a sequence whose prompt was computed apart take part in the next steps."""
        _remove(self.apart, entry)
        bisect.insort(self.rowless, entry, key=_rank)

    def withdraw_row(self, sequence: Sequence) -> None:
        """Takes the row from a running sequence that the next step does not compute as a row."""
        if sequence in self._rows:
            self._rows.remove(sequence)
            bisect.insort(self.rowless, self._entries[sequence], key=_rank)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every sequence is in exactly the queues where it belongs."""
        rowless = {entry.sequence for entry in (*self.rowless, *self.held, *self.apart)}
        running = [entry.sequence for entry in self.running]
        waiting = (*self.waiting, *self.waiting_bulk)
        assert len(self.rowless) + len(self.held) + len(self.apart) == len(rowless)
        assert all(entry.sequence.num_uncomputed_tokens > 1 for entry in self.apart)
        assert len(rowless) + len(self._rows) == len(running), "a running sequence has a row, is rowless or held back"
        assert all((sequence in self._rows) != (sequence in rowless) for sequence in running)
        assert {*self.running, *waiting, *self._detached} == {*self._entries.values()}
        assert len(self.running) + len(waiting) + len(self._detached) == len(self._entries)
        assert all(sequence.pages for sequence in running)
        assert not any(entry.sequence.num_computed_tokens for entry in waiting)
        assert all(entry.is_bulk for entry in (*self.held, *self.waiting_bulk))
        assert not any(entry.is_bulk for entry in self.waiting)
        assert self.num_bulk == sum(entry.is_bulk for entry in self._entries.values())
        assert self.num_running_bulk == sum(entry.is_bulk for entry in self.running)
        assert self._num_waiting_tokens == sum(len(entry.sequence.token_ids) for entry in self.waiting)
        assert self._num_waiting_bulk_tokens == sum(len(entry.sequence.token_ids) for entry in self.waiting_bulk)


def _num_uncomputed(entries: Iterable[TrackedSequence]) -> int:
    return sum(entry.sequence.num_uncomputed_tokens - 1 for entry in entries)


def _rank(entry: TrackedSequence) -> tuple[float, int]:
    return entry.rank


def _place_in(queue: list[TrackedSequence], entry: TrackedSequence) -> int:
    # Ranks are unique, since they count arrivals.
    return bisect.bisect_left(queue, entry.rank, key=_rank)


def _contains(queue: list[TrackedSequence], entry: TrackedSequence) -> bool:
    place = _place_in(queue, entry)
    return place < len(queue) and queue[place] is entry


def _remove(queue: list[TrackedSequence], entry: TrackedSequence) -> None:
    place = _place_in(queue, entry)
    assert queue[place] is entry
    del queue[place]
