"""Tests adapter slots with random histories: a slot in use is never reassigned, and the least recently used goes
first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.adapters.slot_policy import AdapterSlots, SlotState

NAMES = st.sampled_from("abcdef")


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(3)
        self.users: dict[str, int] = {}  # of every adapter that has a slot
        self.place: dict[str, int] = {}
        self.loading: set[str] = set()

    @rule(name=NAMES)
    def acquire(self, name: str) -> None:
        unused = [each for each, count in self.users.items() if not count and each not in self.loading]
        grant = self.slots.acquire(name)
        if name in self.users:
            assert grant is not None
            assert (grant.slot, grant.must_load, grant.evicted) == (self.place[name], False, None)
        elif len(self.users) == 3 and not unused:
            assert grant is None
            return
        else:
            assert grant is not None
            assert grant.must_load
            assert (grant.evicted in unused) if len(self.users) == 3 else (grant.evicted is None)
            if grant.evicted is not None:
                del self.users[grant.evicted], self.place[grant.evicted]
            assert grant.slot not in self.place.values()
            self.place[name] = grant.slot
            self.loading.add(name)
        self.users[name] = self.users.get(name, 0) + 1

    @precondition(lambda self: self.loading)
    @rule(works=st.booleans(), data=st.data())
    def finish(self, works: bool, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(name)
        if works:
            self.slots.loaded(name)
        else:
            self.slots.failed(name)
            del self.users[name], self.place[name]

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, count in self.users.items() if count)))
        self.slots.release(name)
        self.users[name] -= 1

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        may_go = not self.users.get(name) and name not in self.loading
        assert self.slots.drop(name) == may_go
        if may_go:
            self.users.pop(name, None)
            self.place.pop(name, None)

    @invariant()
    def agrees(self) -> None:
        self.slots.check_integrity()
        assert set(self.slots.ready) == set(self.users) - self.loading
        for name in "abcdef":
            assert self.slots.num_users(name) == self.users.get(name, 0)


TestSlots = SlotMachine.TestCase


def test_the_least_recently_used_adapter_is_dropped_first() -> None:
    slots = AdapterSlots(2)
    for name in "ab":
        slots.acquire(name)
        slots.loaded(name)
        slots.release(name)
    slots.acquire("a")
    slots.release("a")
    grant = slots.acquire("c")
    assert grant is not None
    assert grant.evicted == "b"
    assert slots.state("b") is SlotState.EMPTY


def test_releasing_too_often_is_an_error() -> None:
    slots = AdapterSlots(1)
    slots.acquire("a")
    slots.release("a")
    with pytest.raises(AssertionError, match="released more often"):
        slots.release("a")
