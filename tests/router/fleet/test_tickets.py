"""Tests what a router books for issued tickets: for how long, and that all of it is counted once and freed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.client.channels import WorkerChannels, worker_address
from penstock.client.retry import Attempts, RetryBudget, RetryPolicy
from penstock.errors import ConfigError, SequenceMoved, Unavailable
from penstock.rpc.secret import ClusterSecret
from penstock.types import Epoch
from penstock.v1 import inference_pb2, worker_pb2
from router.fleet import tickets
from router.fleet.tickets import IssuedTickets, Silence
from tests.router.api.test_grpc_service import collect, failure, request
from tests.support.key_files import write_secret
from tests.support.router.router_fakes import FakeWorker, running_router, until

WORKER = Epoch(5)
FAR_S = 1e9  # monotonic


@dataclass
class Holder:
    heard: list[Any] = field(default_factory=list)

    def on_state(self, state: worker_pb2.TicketState) -> None:
        self.heard.append("state")

    def on_over(self, state: worker_pb2.TicketState) -> None:
        self.heard.append("over")

    def on_silence(self, why: Silence) -> None:
        self.heard.append(why.value)


def out(book: IssuedTickets, name: str = "a", lifetime_ms: int = 5000, deadline_s: float = FAR_S) -> Holder:
    holder = Holder()
    book.add(worker_pb2.Ticket(id=name, epoch=WORKER, lifetime_ms=lifetime_ms), "acme", deadline_s, holder)
    return holder


def state(name: str = "a", *, over: bool = False) -> worker_pb2.TicketState:
    return worker_pb2.TicketState(id=name, over=over)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SKEW_S", "_LAG_S", "_AWAY_S"):
        monkeypatch.setattr(tickets, name, 0.01)


async def test_repeated_and_foreign_states_change_nothing() -> None:
    book = IssuedTickets(Epoch(1))
    holder = out(book)
    book.on_states(Epoch(6), [state(over=True)])  # another epoch
    book.on_states(WORKER, [state("b", over=True)])
    assert holder.heard == []
    book.on_states(WORKER, [state(), state(), state(over=True), state(over=True)])
    assert holder.heard == ["state", "state", "over"]
    assert len(book) == 0


async def test_an_unused_ticket_ends_with_its_lifetime() -> None:
    book = IssuedTickets(Epoch(1))
    holder = out(book, lifetime_ms=1)
    async with asyncio.timeout(60):
        await book.wait_idle(WORKER)
    assert holder.heard == ["unused"]


async def test_a_returning_worker_keeps_only_the_tickets_it_reports() -> None:
    book = IssuedTickets(Epoch(1))
    lost, kept, unused = (out(book, name) for name in ("lost", "kept", "unused"))
    book.on_states(WORKER, [state("lost"), state("kept")])
    book.on_away(WORKER)
    book.on_states(WORKER, [state("kept")])  # reported again with the first batch of its next call
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await book.wait_idle(WORKER)
    assert (lost.heard, kept.heard) == (["state", "worker lost"], ["state", "state"])
    assert unused.heard == []  # its client may still arrive once the worker is back
    book.close()


async def test_a_lost_report_is_bounded_by_the_deadline() -> None:
    book = IssuedTickets(Epoch(1))
    holder = out(book, deadline_s=0.0)
    book.on_states(WORKER, [state()])
    async with asyncio.timeout(60):
        await book.wait_idle(WORKER)
    assert holder.heard == ["state", "late"]


async def test_unused_tickets_are_counted_by_tenant() -> None:
    book = IssuedTickets(Epoch(1))
    for name, lifetime_ms in (("a", 5000), ("b", 5000), ("c", 1)):
        out(book, name, lifetime_ms)
    assert (book.num_unused("acme"), book.num_unused("other")) == (3, 0)
    book.on_states(WORKER, [state("a"), state("a"), state("b", over=True)])
    await until(lambda: len(book) == 1)
    assert book.num_unused("acme") == 0
    book.close()


# A router with tickets.


@pytest.fixture
def lookaside_worker() -> FakeWorker:
    worker = FakeWorker()
    worker._description.lookaside_address = ":1"
    worker._description.max_running = 16
    return worker


@pytest.fixture
def security(tmp_path: Path) -> dict[str, object]:
    return write_secret(tmp_path / "secret", ClusterSecret.make())


async def test_a_tenants_unused_tickets_are_bounded_and_further_clients_use_generate(
    lookaside_worker: FakeWorker, security: dict[str, object]
) -> None:
    await lookaside_worker.start()
    async with running_router(lookaside_worker, security=security) as router:
        for _ in range(4):  # a quarter of the slots
            await router.stub.Route(request(token_ids=[5, 6, 7], max_tokens=2), timeout=20)
        error = await failure(router.stub.Route(request(token_ids=[5, 6, 7], max_tokens=2)))
        assert isinstance(error, ConfigError)
        assert "4 tickets of this tenant are unused; call Generate" in error.message
        assert router.server.context.gate.admission.num_inside == 4
        assert len(await collect(router.stub.Generate(request(token_ids=[5, 6, 7], max_tokens=2)))) == 2


async def test_a_slow_client_of_a_ticket_is_not_its_workers_failure(
    lookaside_worker: FakeWorker, security: dict[str, object]
) -> None:
    """The deadline of a used ticket passes without the stream's end, as when its client does not read."""
    await lookaside_worker.start()
    async with running_router(lookaside_worker, security=security) as router:
        fleet = router.server.fleet
        for _ in range(5):  # as many failures would open a breaker
            await router.stub.Route(request(token_ids=[5, 6, 7], max_tokens=2), timeout=2.0)
            ticket_id, entry = next(iter(fleet.tickets._entries.items()))
            fleet.tickets.on_states(entry.worker, [state(ticket_id)])
            async with asyncio.timeout(60):
                await fleet.tickets.wait_idle(entry.worker)
        assert fleet.health.is_without_failures
        assert router.server.context.gate.admission.num_inside == 0


def test_one_migration_is_no_retry_but_two_without_a_token_are() -> None:
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
    ("address", "router", "wanted"),
    [
        ("10.0.0.7:4000", "router:50051", "10.0.0.7:4000"),
        (":4000", "router:50051", "router:4000"),
        (":4000", "[::1]:50051", "[::1]:4000"),
        (":4000", "dns:///router:50051", "dns:///router:4000"),
    ],
)
def test_an_address_without_a_host_means_the_routers_host(address: str, router: str, wanted: str) -> None:
    assert worker_address(inference_pb2.RouteResponse(address=address), router) == wanted


def test_channels_are_shared_and_broken_ones_close_after_their_last_use() -> None:
    made: list[object] = []

    def connect(address: str) -> object:
        made.append(object())
        return made[-1]

    channels = WorkerChannels(connect)
    first = channels.acquire("a")
    assert channels.acquire("a") is first
    assert channels.release("a", broken=True) is None
    assert channels.release("a", broken=True) is first
    assert channels.acquire("a") is not first
    assert channels.release("a", broken=False) is None
    assert channels.remove_all() == [made[1]]
