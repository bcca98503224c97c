"""Keeps a decode worker's running and waiting sequences in order of rank, and knows which running ones have a row.
Pure.

The decode scheduler owns it and decides which sequences change queues. A sequence keeps its rank for its whole life: by
arrival, with a head start for interactive over standard over bulk (`penstock.scheduling.lane_order`). Neither queue
holds a sequence whose pages are still coming from elsewhere, or one that is paused.
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

# How many later arrivals may go first.
HANDICAP_REQUESTS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 32, Lane.BULK: 256}


@dataclass(slots=True, eq=False)
class TrackedSequence:
    """A sequence and its scheduling state."""

    sequence: Sequence
    rank: tuple[float, int]  # lower ranks go first; the second number counts arrivals
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_preemptions: int = 0


class RunQueues:
    """Owns the tracked sequences and which are in `rows`. The lists are sorted by rank; others only read them."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._entries: dict[Sequence, TrackedSequence] = {}
        self._num_arrivals = 0
        self._aging = LaneOrder(HANDICAP_REQUESTS)
        self.running: list[TrackedSequence] = []
        self.rowless: list[TrackedSequence] = []  # running sequences that are new or computed in chunks
        self.waiting: list[TrackedSequence] = []  # sequences to be computed here
        self._num_waiting_tokens = 0
        self._detached: set[TrackedSequence] = set()  # sequences in neither queue

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens of prompts and preempted sequences that this worker has yet to compute."""
        return self._num_waiting_tokens + sum(entry.sequence.num_uncomputed_tokens - 1 for entry in self.rowless)

    @property
    def num_holding(self) -> int:
        """The number of sequences that hold pages: running, paused, or with a transfer in flight."""
        return len(self.running) + sum(1 for entry in self._detached if entry.sequence.pages)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def __getitem__(self, sequence: Sequence) -> TrackedSequence:
        return self._entries[sequence]

    def is_running(self, sequence: Sequence) -> bool:
        """Returns whether it gets a token in every step: it runs, and all its tokens have KV here except the last one
        or those that its grammar has forced.
        """
        if sequence in self._rows:
            return True
        entry = self._entries.get(sequence)
        return entry in self.rowless and (sequence.num_uncomputed_tokens == 1 or sequence.is_fast_forwarding)

    def by_rank(self, sequences: Iterable[Sequence]) -> list[TrackedSequence]:
        return sorted((self._entries[sequence] for sequence in sequences), key=_rank)

    def waiting_before(self, sequence: Sequence, most: int) -> list[TrackedSequence]:
        """Returns the first waiting sequences that rank before `sequence`, at most so many."""
        num_before = bisect.bisect_left(self.waiting, self._entries[sequence].rank, key=_rank)
        return self.waiting[: min(num_before, most)]

    def behind(self, entry: TrackedSequence) -> list[TrackedSequence]:
        """Returns the running sequences that rank behind `entry`."""
        return self.running[bisect.bisect_right(self.running, entry.rank, key=_rank) :]

    # Moves between queues.

    def track(self, sequence: Sequence) -> None:
        """Starts to track the sequence and gives it its rank."""
        self._num_arrivals += 1
        rank = (self._aging.rank(sequence.lane), self._num_arrivals)
        entry = self._entries[sequence] = TrackedSequence(sequence, rank)
        self._detached.add(entry)
        self._aging.advance(1)

    def forget(self, sequence: Sequence) -> bool:
        """Removes the sequence everywhere. Returns False if it is not tracked."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return False
        if _contains(self.waiting, entry):
            self._stop_waiting(entry)
        elif _contains(self.running, entry):
            self.stop(entry)
        self._detached.remove(entry)
        return True

    def wait(self, entry: TrackedSequence) -> None:
        self._detached.remove(entry)
        bisect.insort(self.waiting, entry, key=_rank)
        self._num_waiting_tokens += len(entry.sequence.token_ids)

    def _stop_waiting(self, entry: TrackedSequence) -> None:
        _remove(self.waiting, entry)
        self._num_waiting_tokens -= len(entry.sequence.token_ids)
        self._detached.add(entry)

    def admit(self, entry: TrackedSequence) -> None:
        """Turns a waiting sequence into a running one."""
        self._stop_waiting(entry)
        self.run(entry)

    def run(self, entry: TrackedSequence) -> None:
        self._detached.remove(entry)
        bisect.insort(self.running, entry, key=_rank)
        bisect.insort(self.rowless, entry, key=_rank)

    def stop(self, entry: TrackedSequence) -> None:
        """Takes a running sequence out of the queue and removes its row."""
        _remove(self.running, entry)
        self._detached.add(entry)
        if entry.sequence in self._rows:
            self._rows.remove(entry.sequence)
        else:
            _remove(self.rowless, entry)

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

    def withdraw_row(self, sequence: Sequence) -> None:
        """Takes the row from a running sequence that has more to compute than its next token."""
        if sequence in self._rows:
            self._rows.remove(sequence)
            bisect.insort(self.rowless, self._entries[sequence], key=_rank)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every sequence is in exactly the queues where it belongs."""
        rowless = {entry.sequence for entry in self.rowless}
        running = [entry.sequence for entry in self.running]
        assert len(rowless) + len(self._rows) == len(running), "a running sequence has a row or is rowless"
        assert all((sequence in self._rows) != (sequence in rowless) for sequence in running)
        assert {*self.running, *self.waiting, *self._detached} == {*self._entries.values()}
        assert len(self.running) + len(self.waiting) + len(self._detached) == len(self._entries)
        assert all(sequence.pages for sequence in running)
        assert not any(entry.sequence.num_computed_tokens for entry in self.waiting)
        assert self._num_waiting_tokens == sum(len(entry.sequence.token_ids) for entry in self.waiting)


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
