"""Tests that what a request books on workers and links is removed, however the request ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from penstock.errors import Overloaded
from penstock.types import RequestId, SamplingParams, WorkerId
from router.dispatch.token_stream import TokenStream
from router.prepared_request import PreparedRequest
from router.routing.costs.inflight import InflightLedger
from tests.router.api.test_grpc_service import collect, failure, read_tokens, request
from tests.support.router.router_fakes import FakeWorker, RunningRouter, running_router, until

PROMPT = list(range(300, 364))
DECODES = ("decode-0", "decode-1")


@dataclass
class World:
    """Holds two decode workers, and a prefill worker from which a prompt's pages are to come."""

    router: RunningRouter
    decodes: list[FakeWorker]

    @property
    def ledger(self) -> InflightLedger:
        return self.router.server.fleet.ledger

    @property
    def link_bytes(self) -> int:
        """Returns the bytes booked for the links; unlike work at a worker, no report removes them."""
        return sum(self.ledger.link_bytes((WorkerId("prefill-0"), WorkerId(name))) for name in DECODES)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    decodes = [await FakeWorker(name, epoch=epoch).start() for epoch, name in enumerate(DECODES, 1)]
    prefill = await FakeWorker("prefill-0", epoch=9, role="prefill").start()
    async with running_router(*decodes, prefill, policy="round-robin") as router:
        yield World(router, decodes)


async def test_the_first_token_removes_a_transfer_from_the_link(world: World) -> None:
    for worker in world.decodes:
        worker.pause_at = 1
    call = world.router.stub.Generate(request(token_ids=PROMPT))
    await read_tokens(call, 1)
    assert world.link_bytes == 0
    call.cancel()


async def test_a_client_that_leaves_before_the_first_token_removes_its_bookings(world: World) -> None:
    for worker in world.decodes:
        worker.pause_at = 0
    call = world.router.stub.Generate(request(token_ids=PROMPT, n=2))
    # The other bookings end with the first token.
    await until(lambda: sum(len(worker.running) for worker in world.decodes) == 1)
    assert world.link_bytes > 0
    call.cancel()
    await until(lambda: not any(worker.running for worker in world.decodes))
    assert world.link_bytes == 0
    assert world.ledger.totals() == []


async def test_a_refused_request_leaves_nothing_booked(world: World) -> None:
    world.decodes[0].refuse_with = Overloaded("full", 1.0)
    for _ in range(8):
        await collect(world.router.stub.Generate(request(token_ids=PROMPT)))
    assert world.link_bytes == 0
    assert world.router.server.fleet.health.is_without_failures  # a full worker has not failed
    world.decodes[1].refuse_with = Overloaded("full too", 1.0)
    assert isinstance(await failure(world.router.stub.Generate(request(token_ids=PROMPT))), Overloaded)
    assert world.link_bytes == 0


async def test_once_a_suspect_ends_the_next_one_can_be_tried(world: World) -> None:
    context, now_s = world.router.server.context, time.monotonic()
    prepared = PreparedRequest(RequestId("r"), PROMPT, SamplingParams(max_tokens=4), "r1", now_s, now_s + 60)
    with TokenStream(prepared, context, lambda used: None) as stream:
        await context.quarantine.isolation.acquire()
        stream._completions[0].in_isolation = True
    assert not context.quarantine.isolation.locked()


async def test_without_a_budget_no_request_is_sent_again() -> None:
    worker = await FakeWorker(refuse_with=Overloaded("full", 1.0)).start()
    sound = await FakeWorker("decode-1", epoch=2, refuse_with=Overloaded("full too", 1.0)).start()
    budget = {"retry_share": 0.0, "retry_reserve": 1}
    async with running_router(worker, sound, admission=budget) as router:
        problems = [(await failure(router.stub.Generate(request("again")))).message for _ in range(3)]
        assert all("too many requests were re-dispatched lately" in problem for problem in problems)
        assert len(worker.submits) + len(sound.submits) == 4  # the first request spent the budget
