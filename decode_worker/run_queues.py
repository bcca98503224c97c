"""Who runs and who waits at a decode worker, by rank, and who of those that run has a row. Pure.

Owned by the decode scheduler, which decides who changes places. A sequence has its rank for its whole life: by arrival,
interactive ones with a head start before standard ones before bulk (penstock/aging.py). Neither queue holds a sequence
that is tracked while its pages come from elsewhere, or that is paused.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from engine.sequence import Sequence
from engine.step_plan import Rows
from penstock.aging import Aging
from penstock.types import Lane

# Later arrivals that may go first.
HANDICAP_REQUESTS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 32, Lane.BULK: 256}


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence and what scheduling remembers of it."""

    sequence: Sequence
    rank: tuple[float, int]  # lower ones go first; the second counts the order of arrival
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_preemptions: int = 0


class RunQueues:
    """Owns the entries, and who is in `rows`. The lists are by rank, and others only read them."""

    def __init__(self, rows: Rows[Any]) -> None:
        self._rows = rows
        self._entries: dict[Sequence, Entry] = {}
        self._num_arrivals = 0
        self._aging = Aging(HANDICAP_REQUESTS)
        self.running: list[Entry] = []
        self.rowless: list[Entry] = []  # of these: computed in chunks, or new
        self.waiting: list[Entry] = []  # to be computed here
        self._num_waiting_tokens = 0
        self._aside: set[Entry] = set()  # neither: paused, or their pages come from elsewhere

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of prompts (and of preempted sequences) that are to be computed here."""
        return self._num_waiting_tokens + sum(entry.sequence.num_uncomputed_tokens - 1 for entry in self.rowless)

    @property
    def num_holding(self) -> int:
        """Sequences that hold pages: running, or with a transfer under way."""
        return len(self.running) + sum(1 for entry in self._aside if entry.sequence.pages)

    def __getitem__(self, sequence: Sequence) -> Entry:
        return self._entries[sequence]

    def is_running(self, sequence: Sequence) -> bool:
        """Whether it gets a token in every step: it runs, and the KV of all its tokens but the last is here."""
        if sequence in self._rows:
            return True
        entry = self._entries.get(sequence)
        return entry in self.rowless and sequence.num_uncomputed_tokens == 1

    def in_rank(self, sequences: Iterable[Sequence]) -> list[Entry]:
        return sorted((self._entries[sequence] for sequence in sequences), key=_rank)

    def behind(self, entry: Entry) -> list[Entry]:
        """Those that run and rank behind it."""
        return self.running[bisect.bisect_right(self.running, entry.rank, key=_rank) :]

    # Who comes, goes and changes places.

    def track(self, sequence: Sequence) -> None:
        """From now on the sequence has its rank."""
        self._num_arrivals += 1
        entry = self._entries[sequence] = Entry(sequence, (self._aging.rank(sequence.lane), self._num_arrivals))
        self._aside.add(entry)
        self._aging.advance(1)

    def forget(self, sequence: Sequence) -> bool:
        """False where it is not known."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return False
        if _stands_in(self.waiting, entry):
            self._wait_no_more(entry)
        elif _stands_in(self.running, entry):
            self.stop(entry)
        self._aside.remove(entry)
        return True

    def wait(self, entry: Entry) -> None:
        self._aside.remove(entry)
        bisect.insort(self.waiting, entry, key=_rank)
        self._num_waiting_tokens += len(entry.sequence.token_ids)

    def _wait_no_more(self, entry: Entry) -> None:
        _take_out(self.waiting, entry)
        self._num_waiting_tokens -= len(entry.sequence.token_ids)
        self._aside.add(entry)

    def admit(self, entry: Entry) -> None:
        """One that waits runs from now on."""
        self._wait_no_more(entry)
        self.run(entry)

    def run(self, entry: Entry) -> None:
        self._aside.remove(entry)
        bisect.insort(self.running, entry, key=_rank)
        bisect.insort(self.rowless, entry, key=_rank)

    def stop(self, entry: Entry) -> None:
        """One that runs does so no longer."""
        _take_out(self.running, entry)
        self._aside.add(entry)
        if entry.sequence in self._rows:
            self._rows.remove(entry.sequence)
        else:
            _take_out(self.rowless, entry)

    def seat(self, entries: Seq[Entry]) -> None:
        """Those who decode from now on get their row."""
        if entries:
            for entry in entries:
                self._rows.add(entry.sequence)
            self.rowless = [entry for entry in self.rowless if entry.sequence not in self._rows]

    def seat_awaiting(self, places: Mapping[Sequence, int], step: int) -> None:
        """Those whose next token that step draws, each at its place of the step's plan, get their row already."""
        for sequence, place in places.items():
            self._rows.add_awaiting(sequence, step, place)
        if places:
            self.rowless = [entry for entry in self.rowless if entry.sequence not in places]

    def unseat(self, sequence: Sequence) -> None:
        """One that runs has more to compute than its next token: no row for it, if it has one."""
        if sequence in self._rows:
            self._rows.remove(sequence)
            bisect.insort(self.rowless, self._entries[sequence], key=_rank)

    def check_integrity(self) -> None:
        """Raises AssertionError unless everybody is where they should be."""
        rowless = {entry.sequence for entry in self.rowless}
        running = [entry.sequence for entry in self.running]
        assert len(rowless) + len(self._rows) == len(running), "who runs has a row or is among the rowless"
        assert all((one in self._rows) != (one in rowless) for one in running)
        assert {*self.running, *self.waiting, *self._aside} == {*self._entries.values()}
        assert len(self.running) + len(self.waiting) + len(self._aside) == len(self._entries)
        assert all(one.pages for one in running)
        assert not any(entry.sequence.num_computed_tokens for entry in self.waiting)
        assert self._num_waiting_tokens == sum(len(entry.sequence.token_ids) for entry in self.waiting)


def _rank(entry: Entry) -> tuple[float, int]:
    return entry.rank


def _place_in(queue: list[Entry], entry: Entry) -> int:
    """Ranks are unique: they count arrivals."""
    return bisect.bisect_left(queue, entry.rank, key=_rank)


def _stands_in(queue: list[Entry], entry: Entry) -> bool:
    place = _place_in(queue, entry)
    return place < len(queue) and queue[place] is entry


def _take_out(queue: list[Entry], entry: Entry) -> None:
    place = _place_in(queue, entry)
    assert queue[place] is entry
    del queue[place]
