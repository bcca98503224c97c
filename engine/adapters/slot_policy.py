"""Decides which adapter is in which slot: a new adapter replaces the least recently used one that is not in use. Pure
bookkeeping.

A slot that is in use or being written is never given to another adapter.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum, auto


class SlotState(Enum):
    EMPTY = auto()
    LOADING = auto()
    READY = auto()


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.EMPTY
    revision: str = ""
    num_users: int = 0
    used: int = 0  # a number that rises with each use


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """A slot that the caller holds until it releases it."""

    slot: int
    must_load: bool  # the caller must write the adapter into it, and then call `loaded` or `failed`
    evicted: str | None = None  # the revision that was evicted for it


class AdapterSlots:
    """Tracks which adapter each slot holds. Slots are numbered from 1; adapters are identified by revision."""

    def __init__(self, num_slots: int) -> None:
        self._slots = {number: _Slot() for number in range(1, num_slots + 1)}
        self._by_revision: dict[str, int] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ready(self) -> list[str]:
        """The revisions that can be used at once, the most recently used first."""
        ready = [slot for slot in self._slots.values() if slot.state is SlotState.READY]
        return [slot.revision for slot in sorted(ready, key=lambda slot: -slot.used)]

    def state(self, revision: str) -> SlotState:
        number = self._by_revision.get(revision)
        return SlotState.EMPTY if number is None else self._slots[number].state

    def is_ready(self, revision: str) -> bool:
        return self.state(revision) is SlotState.READY

    def num_users(self, revision: str) -> int:
        number = self._by_revision.get(revision)
        return 0 if number is None else self._slots[number].num_users

    def acquire(self, revision: str) -> SlotGrant | None:
        """Returns a slot for one more user of the adapter; None while every slot is used by others."""
        number = self._by_revision.get(revision)
        if number is not None:
            self._use(number)
            return SlotGrant(number, must_load=False)
        number = self._find_room()
        if number is None:
            return None
        slot = self._slots[number]
        evicted = slot.revision or None
        if evicted is not None:
            del self._by_revision[evicted]
        slot.state, slot.revision = SlotState.LOADING, revision
        self._by_revision[revision] = number
        self._use(number)
        return SlotGrant(number, must_load=True, evicted=evicted)

    def _use(self, number: int) -> None:
        slot = self._slots[number]
        slot.num_users += 1
        slot.used = next(self._clock)

    def _find_room(self) -> int | None:
        free = [
            (slot.state is not SlotState.EMPTY, slot.used, number)
            for number, slot in self._slots.items()
            if not slot.num_users and slot.state is not SlotState.LOADING
        ]
        return min(free)[2] if free else None

    def loaded(self, revision: str) -> None:
        self._slots[self._by_revision[revision]].state = SlotState.READY

    def failed(self, revision: str) -> None:
        """Empties a slot whose adapter could not be written. Its users no longer hold anything."""
        number = self._by_revision.pop(revision)
        self._slots[number] = _Slot()

    def release(self, revision: str) -> None:
        """Releases one use of the adapter's slot."""
        slot = self._slots[self._by_revision[revision]]
        assert slot.num_users > 0, f"{revision} is released more often than it was acquired"
        slot.num_users -= 1

    def drop(self, revision: str) -> bool:
        """Empties the adapter's slot if nobody uses it. Returns whether the adapter is gone."""
        number = self._by_revision.get(revision)
        if number is None:
            return True
        slot = self._slots[number]
        if slot.num_users or slot.state is SlotState.LOADING:
            return False
        del self._by_revision[revision]
        self._slots[number] = _Slot()
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots and revisions agree."""
        named = {slot.revision: number for number, slot in self._slots.items() if slot.state is not SlotState.EMPTY}
        assert named == self._by_revision
        for slot in self._slots.values():
            assert slot.num_users >= 0
            assert slot.state is not SlotState.EMPTY or not (slot.num_users or slot.revision)
