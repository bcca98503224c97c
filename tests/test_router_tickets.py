"""What a router holds for tickets that are out: until when, and that everything is counted once and given back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.errors import SequenceMoved, Unavailable
from penstock.retry import Attempts, RetryBudget, RetryPolicy
from penstock.routed_call import WorkerChannels, address_of
from penstock.types import Epoch, WorkerId
from penstock.v1 import inference_pb2, worker_pb2
from router import tickets
from router.inflight import NO_WORK, InflightLedger, Work
from router.tickets import Tickets

WORKER = Epoch(5)
FAR_S = 1e9  # monotonic


@dataclass
class Holder:
    heard: list[Any] = field(default_factory=list)

    def on_state(self, state: worker_pb2.TicketState) -> None:
        self.heard.append("state")

    def on_over(self, state: worker_pb2.TicketState) -> None:
        self.heard.append("over")

    def on_silence(self, *, used: bool) -> None:
        self.heard.append("lost" if used else "unused")


def out(book: Tickets, name: str = "a", lifetime_ms: int = 5000, deadline_s: float = FAR_S) -> Holder:
    holder = Holder()
    book.add(worker_pb2.Ticket(id=name, epoch=WORKER, lifetime_ms=lifetime_ms), deadline_s, holder)
    return holder


def state(name: str = "a", *, over: bool = False) -> worker_pb2.TicketState:
    return worker_pb2.TicketState(id=name, over=over)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SKEW_S", "_LAG_S", "_AWAY_S"):
        monkeypatch.setattr(tickets, name, 0.01)


async def test_what_comes_twice_or_from_elsewhere_does_no_harm() -> None:
    book = Tickets(Epoch(1))
    holder = out(book)
    book.on_states(Epoch(6), [state(over=True)])  # another incarnation
    book.on_states(WORKER, [state("b", over=True)])
    assert holder.heard == []
    book.on_states(WORKER, [state(), state(), state(over=True), state(over=True)])
    assert holder.heard == ["state", "state", "over"]
    assert len(book) == 0


async def test_an_unused_one_ends_with_its_time() -> None:
    book = Tickets(Epoch(1))
    holder = out(book, lifetime_ms=1)
    async with asyncio.timeout(5):
        await book.wait_idle(WORKER)
    assert holder.heard == ["unused"]


async def test_a_worker_that_stays_away_loses_its_tickets_and_one_that_is_back_keeps_them() -> None:
    book = Tickets(Epoch(1))
    lost, kept = out(book, "lost"), out(book, "kept")
    book.on_states(WORKER, [state("lost"), state("kept")])
    book.on_away(WORKER)
    book.on_states(WORKER, [state("kept")])  # told anew, with the first batch of its next call
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await book.wait_idle(WORKER)
    assert (lost.heard, kept.heard) == (["state", "lost"], ["state", "state"])
    book.close()


async def test_a_lost_report_is_bounded_by_the_deadline() -> None:
    book = Tickets(Epoch(1))
    holder = out(book, deadline_s=0.0)
    book.on_states(WORKER, [state()])
    async with asyncio.timeout(5):
        await book.wait_idle(WORKER)
    assert holder.heard == ["state", "lost"]


def test_credits_of_what_a_client_has_yet_to_send_outlast_reports() -> None:
    ledger, worker = InflightLedger(), WorkerId("decode-0")
    keys = [ledger.record(worker, Work(num_requests=1, num_pages=3), 0.0)]
    ledger.pin(keys)
    ledger.on_report(worker, 100.0)
    assert ledger.totals() == [(worker, Work(1, 3))]
    ledger.unpin(keys, 100.0)
    ledger.unpin(keys, 100.0)
    ledger.on_report(worker, 100.0)
    assert ledger.sent_to(worker) == Work(1, 3)
    ledger.on_report(worker, 101.0)
    assert ledger.sent_to(worker) == NO_WORK
    again = [ledger.record(worker, Work(num_requests=1), 101.0)]
    ledger.pin(again)
    ledger.settle(again)
    ledger.settle(again)
    assert (ledger.sent_to(worker), ledger.totals()) == (NO_WORK, [])


def test_a_move_is_no_retry_but_two_without_a_token_between_are() -> None:
    budget = RetryBudget(share=0.0, reserve=1.0)
    attempts = Attempts(RetryPolicy(max_attempts=2), None, budget)
    attempts.progress(0.0)
    moved = SequenceMoved("it is elsewhere")
    for _ in range(50):
        assert attempts.next_delay_s(moved, 0.0, lambda: 0.5) == 0.0
        attempts.progress(0.0)
    assert budget.balance == 1.0
    assert attempts.next_delay_s(moved, 0.0, lambda: 0.5) == 0.0
    with pytest.raises(SequenceMoved):
        attempts.next_delay_s(moved, 0.0, lambda: 0.5)
    fresh = Attempts(RetryPolicy(), None, budget)
    assert fresh.next_delay_s(Unavailable("gone"), 0.0, lambda: 0.5) > 0
    assert budget.balance == 0.0


@pytest.mark.parametrize(
    ("told", "router", "wanted"),
    [
        ("10.0.0.7:4000", "router:50051", "10.0.0.7:4000"),
        (":4000", "router:50051", "router:4000"),
        (":4000", "[::1]:50051", "[::1]:4000"),
        (":4000", "dns:///router:50051", "dns:///router:4000"),
    ],
)
def test_an_address_without_a_host_is_at_the_router(told: str, router: str, wanted: str) -> None:
    assert address_of(inference_pb2.RouteResponse(address=told), router) == wanted


def test_channels_are_shared_and_broken_ones_close_once_nobody_uses_them() -> None:
    made: list[object] = []

    def connect(address: str) -> object:
        made.append(object())
        return made[-1]

    channels = WorkerChannels(connect)
    first = channels.take("a")
    assert channels.take("a") is first
    assert channels.give_back("a", broken=True) is None
    assert channels.give_back("a", broken=True) is first
    assert channels.take("a") is not first
    assert channels.give_back("a", broken=False) is None
    assert channels.take_all() == [made[1]]
