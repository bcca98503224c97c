"""Tests that sequences get slots without blocking, that a slot in use is never taken, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine.adapters.queue import AdapterQueue
from engine.adapters.slot_policy import AdapterSlots
from engine.step.sequence import Sequence
from penstock.errors import AdapterUnavailable, CheckpointError, PenstockError, from_status, to_status
from penstock.kv.adapter_files import AdapterRef
from penstock.types import RequestId, SamplingParams

_TIMEOUT_S = 30.0


class FakeAdapters:
    """Loads adapters on the queue's thread, once the test lets it."""

    def __init__(self, num_slots: int) -> None:
        self.slots = AdapterSlots(num_slots)
        self.load_s = 0.0
        self.loads: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()

    def load(self, ref: AdapterRef, slot: int) -> None:
        assert self.may_load.wait(_TIMEOUT_S)
        self.loads.append((ref.revision, slot))
        if self.error is not None:
            raise self.error


class World:
    def __init__(self, num_slots: int = 1) -> None:
        self.adapters = FakeAdapters(num_slots)
        self.now_s = 0.0
        self.calls: list[Callable[[], None]] = []
        self.posted = threading.Semaphore(0)
        self.outcomes: dict[str, list[PenstockError | None]] = {}
        self.queue = AdapterQueue(self.adapters, self._post, lambda: self.now_s)  # type: ignore[arg-type]

    def _post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self.posted.release()

    def settle(self) -> None:
        """Runs the next call that the queue posts."""
        assert self.posted.acquire(timeout=_TIMEOUT_S)
        self.calls.pop(0)()

    def ask(self, name: str, adapter: str) -> Sequence:
        ref = AdapterRef(adapter, f"revision of {adapter}", f"/adapters/{adapter}")
        sequence = Sequence(RequestId(name), [1], 1, SamplingParams(max_tokens=1), b"", adapter=ref)
        self.ask_again(sequence)
        return sequence

    def ask_again(self, sequence: Sequence) -> None:
        self.queue.when_ready(sequence, self.outcomes.setdefault(sequence.request_id, []).append)


@pytest.fixture
def world() -> World:
    return World()


def test_sequences_of_one_adapter_share_a_load(world: World) -> None:
    world.adapters.may_load.clear()
    first, second = world.ask("first", "sql"), world.ask("second", "sql")
    world.ask_again(first)
    assert world.outcomes == {"first": [], "second": []}
    world.adapters.may_load.set()
    world.settle()
    assert world.outcomes == {"first": [None, None], "second": [None]}
    assert first.adapter_slot == second.adapter_slot == 1
    assert world.adapters.loads == [("revision of sql", 1)]
    assert world.queue.ready == ("revision of sql",)
    world.ask("third", "sql")
    assert world.outcomes["third"] == [None]


def test_a_slot_in_use_is_waited_for(world: World) -> None:
    first = world.ask("first", "sql")
    world.settle()
    second = world.ask("second", "law")
    assert world.outcomes["second"] == []
    assert second.adapter_slot == 0
    world.queue.release(first)
    world.settle()
    assert world.outcomes["second"] == [None]
    assert world.queue.ready == ("revision of law",)
    world.adapters.slots.check_integrity()


def test_waiting_too_long_is_refused(world: World) -> None:
    first = world.ask("first", "sql")
    world.settle()
    world.ask("second", "law")
    assert world.queue.sweep(1.0) == 10.0
    assert world.queue.sweep(10.0) is None
    [error] = world.outcomes["second"]
    assert isinstance(error, AdapterUnavailable)
    assert error.message == (
        "adapter 'law' (/adapters/law): every slot was in use by other adapters for 10 s; raise engine.max_adapters, "
        "or try again"
    )
    assert isinstance(from_status(to_status(error)), AdapterUnavailable)
    world.queue.release(first)
    assert world.adapters.loads == [("revision of sql", 1)]


def test_an_unreadable_adapter_is_refused_and_frees_its_slot(world: World) -> None:
    world.adapters.error = CheckpointError("adapter 'sql' (/adapters/sql): is damaged")
    world.ask("first", "sql")
    world.settle()
    [error] = world.outcomes["first"]
    assert isinstance(error, AdapterUnavailable)
    assert error.message == "adapter 'sql' (/adapters/sql): is damaged"
    world.adapters.error = None
    world.ask("second", "law")
    world.settle()
    assert world.outcomes["second"] == [None]
    world.adapters.slots.check_integrity()


def test_an_unexpected_error_of_a_load_ends_the_wait(world: World) -> None:
    world.adapters.error = RuntimeError("rank 1 is lost")
    world.ask("first", "sql")
    world.settle()
    [error] = world.outcomes["first"]
    assert error is not None
    assert "could not be loaded: RuntimeError: rank 1 is lost" in error.message


def test_a_sequence_released_during_its_load_gets_no_outcome(world: World) -> None:
    world.adapters.may_load.clear()
    world.queue.release(world.ask("first", "sql"))
    second = world.ask("second", "law")
    world.adapters.may_load.set()
    world.settle()  # sql is loaded, but nobody uses it, so it is dropped
    world.settle()
    assert world.outcomes == {"first": [], "second": [None]}
    assert second.adapter_slot == 1
    assert world.queue.num_waiting == 0
    world.adapters.slots.check_integrity()


def test_a_worker_without_slots_refuses_adapters() -> None:
    outcomes: list[PenstockError | None] = []
    queue = AdapterQueue(None, lambda call: None)
    plain = Sequence(RequestId("plain"), [1], 1, SamplingParams(max_tokens=1), b"")
    queue.when_ready(plain, outcomes.append)
    adapted = Sequence(RequestId("a"), [1], 1, SamplingParams(max_tokens=1), b"", adapter=AdapterRef("sql", "r", "/a"))
    queue.when_ready(adapted, outcomes.append)
    queue.release(adapted)
    assert outcomes[0] is None
    assert str(outcomes[1]) == "adapter 'sql' (/a): this worker has no adapter slots; set engine.max_adapters"
