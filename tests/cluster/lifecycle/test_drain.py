"""Tests migration plans, workers that leave a pool, and drains over fake processes and decode workers. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.commands.operating.drain import format_drain
from cluster.lifecycle import drain as drain_module
from cluster.lifecycle.drain import Drain, DrainProgress, DrainStage
from cluster.lifecycle.migrate.migration_policy import (
    ABOUT_TO_END_TOKENS,
    MigratableSequence,
    TargetRoom,
    plan_migrations,
)
from cluster.pools.pool import Pool, Start, WorkerState
from penstock.errors import InvalidInput, from_rpc_error, to_status
from penstock.rpc.server import GrpcServer, make_channel
from penstock.types import Epoch, Member, RequestId, Role, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.cluster.controller.test_controller import World, worker
from tests.cluster.pools.test_pool import lose, make_ready, started

# Migration plans.

sequences_ = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), max_size=20)
rooms_ = st.lists(st.tuples(st.integers(0, 1500), st.integers(-1, 6)), max_size=5)


def movable(number: int, num_tokens: int, num_tokens_left: int = 1000) -> MigratableSequence:
    return MigratableSequence(RequestId(f"r{number:02}"), num_tokens, num_tokens_left)


def room(number: int, free_tokens: int, free_sequences: int = 100) -> TargetRoom:
    return TargetRoom(WorkerId(f"decode-{number}"), Epoch(number), f"host:{number}", free_tokens, free_sequences)


@given(sizes=sequences_, spaces=rooms_)
def test_no_target_is_overfilled_and_no_sequence_migrates_twice(
    sizes: list[tuple[int, int]], spaces: list[tuple[int, int]]
) -> None:
    sequences = {each.request_id: each for each in (movable(number, *size) for number, size in enumerate(sizes))}
    rooms = [room(number, *space) for number, space in enumerate(spaces)]
    moves = plan_migrations(list(sequences.values()), rooms)
    moved = [request_id for move in moves for request_id in move.request_ids]
    assert len(moved) == len(set(moved))
    assert len({move.target.epoch for move in moves}) == len(moves)
    for move in moves:
        assert sum(sequences[each].num_tokens for each in move.request_ids) <= move.target.free_tokens
        assert len(move.request_ids) <= move.target.free_sequences
    assert all(sequences[each].num_tokens_left > ABOUT_TO_END_TOKENS for each in moved)
    # A sequence that stays must fit on no target once the planned migrations are done.
    staying = [
        each for key, each in sequences.items() if key not in moved and each.num_tokens_left > ABOUT_TO_END_TOKENS
    ]
    for each in staying:
        for target in rooms:
            taken = next((move.request_ids for move in moves if move.target == target), ())
            tokens = sum(sequences[request_id].num_tokens for request_id in taken)
            growth = len(taken) * (32 + 25) + 32 + 25
            assert len(taken) >= target.free_sequences or target.free_tokens - tokens < each.num_tokens + growth


def test_the_smallest_sequences_migrate_first_to_the_targets_with_the_most_room() -> None:
    sequences = [movable(1, 300), movable(2, 10), movable(3, 100), movable(4, 50, num_tokens_left=5)]
    moves = plan_migrations(sequences, [room(1, 200), room(2, 170)])
    assert {move.target.worker_id: move.request_ids for move in moves} == {"decode-1": ("r02",), "decode-2": ("r03",)}
    assert plan_migrations(sequences, []) == []


# The pool.


def test_a_drained_worker_is_not_replaced_and_its_pool_shrinks() -> None:
    pool = Pool("decode", 3)
    incarnations = started(pool)
    for each in incarnations:
        make_ready(pool, each)
    pool.drain(incarnations[0], replaced=False)
    assert (pool.replicas, pool.slots[0].state) == (2, WorkerState.DRAINING)
    assert [slot.worker_id for slot in pool.ready()] == ["decode-1", "decode-2"]
    assert pool.reconcile(0.0) == []  # the others keep their places
    lose(pool, incarnations[0])
    assert pool.reconcile(0.0) == []
    assert pool.is_complete
    pool.set_replicas(3)
    assert [(each.worker_id, each.number) for each in started(pool)] == [("decode-0", 2)]


def test_the_successor_of_a_replaced_worker_starts_once_that_has_ended() -> None:
    pool = Pool("decode", 2)
    incarnations = started(pool)
    for each in incarnations:
        make_ready(pool, each)
    pool.drain(incarnations[1], replaced=True)
    assert pool.reconcile(0.0) == []  # its resources are not yet free
    lose(pool, incarnations[1])
    assert [(each.worker_id, each.number) for each in started(pool)] == [("decode-1", 2)]


def test_a_worker_that_dies_while_it_drains_is_not_started_again() -> None:
    pool = Pool("prefill", 1)
    (only,) = started(pool)
    make_ready(pool, only)
    pool.drain(only, replaced=False)
    pool.on_lost(only, "killed")
    assert pool.reconcile(1.0) == []
    pool.on_removed(only, 1.0)
    assert pool.slots == []
    assert not any(isinstance(action, Start) for action in pool.reconcile(100.0))


# The controller.


async def test_a_drain_stops_the_worker_once_it_is_empty_and_shrinks_the_pool() -> None:
    world = World()
    await world.ready()
    membership = world.controller.membership.watch()
    await anext(membership)
    process = world.processes["prefill-0", 1]
    drain = world.controller.draining.drain("prefill-0")
    assert world.controller.draining.drain("prefill-0") is drain  # a second request joins the first
    assert [each.worker_id for each in (await anext(membership)).members] == ["decode-0", "decode-1"]
    status = await world.until(lambda status: worker(status, "prefill-0").state == "draining")
    assert status.ready
    reports = drain.follow()
    await anext(reports)
    await until(lambda: world.controller.reports.is_awaited)
    process.report(worker_pb2.Load(num_open=2))
    assert (await anext(reports)).num_left == 2
    for num_routers in (1, 0):  # the router that still follows the worker may send it requests
        assert not process.stopped
        await until(lambda: world.controller.reports.is_awaited)
        process.report(worker_pb2.Load(num_open=0, num_routers=num_routers))
    stages = [progress.stage async for progress in reports]
    assert stages[-2:] == [DrainStage.STOPPING, DrainStage.ENDED]
    assert process.stopped
    assert process.killed
    status = await world.until(lambda status: len(status.workers) == 3)
    assert "prefill-0" not in [each.member.worker_id for each in status.workers]
    assert not world.controller.draining.is_active
    await world.controller.stop()


async def test_a_worker_that_never_empties_is_stopped_at_the_timeout_and_replaced_on_request() -> None:
    world = World()
    await world.ready()
    process = world.processes["prefill-0", 1]
    process.report(worker_pb2.Load(num_open=3))
    drain = world.controller.draining.drain("prefill-0", timeout_s=2.0, replaced=True)
    await until(lambda: world.controller.reports.is_awaited)
    process.report(worker_pb2.Load(num_open=2))
    seen = [progress async for progress in drain.follow()]
    assert seen[-1].num_cut_short == 2
    assert "2 requests are recomputed elsewhere" in seen[-1].detail
    status = await world.until(lambda status: worker(status, "prefill-0").state == "ready")
    assert ("prefill-0", 2) in world.processes
    assert status.ready
    await world.controller.stop()


async def test_an_impossible_drain_is_refused_with_the_reason() -> None:
    world = World()
    await world.ready()
    controller = world.controller
    with pytest.raises(InvalidInput, match="is 'decode-7'; the workers are decode-0, decode-1, prefill-0"):
        controller.draining.drain("decode-7")
    with pytest.raises(InvalidInput, match="is 'router-0'"):
        controller.draining.drain("router-0")
    world.may_start.clear()
    world.processes["decode-1", 1].lose()
    await world.until(lambda status: worker(status, "decode-1").state == "starting")
    with pytest.raises(InvalidInput, match="decode-1 is starting"):
        controller.draining.drain("decode-1")
    with pytest.raises(InvalidInput, match="decode-0 is the only decode worker that is ready"):
        controller.draining.drain("decode-0")
    await controller.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)


# When a worker counts as empty.


@dataclass
class ScriptedView:
    """Has the next of its reports after each wait, and the last one from then on."""

    reports: list[worker_pb2.Load]
    at_once_after: int = 0  # number of the report that another one follows at once, whether or not anybody waits
    num_given: int = 0

    def is_here(self, member: Member) -> bool:
        return True

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        return self.reports[min(self.num_given, len(self.reports)) - 1] if self.num_given else None

    def members(self, role: Role) -> list[Member]:
        return []

    async def next_report(self, member: Member, seen: worker_pb2.Load | None) -> None:
        await asyncio.sleep(0.001)
        self._give()
        if self.num_given == self.at_once_after:
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self.num_given += 1


def report(num_open: int, num_routers: int | None = None) -> worker_pb2.Load:
    return worker_pb2.Load(num_open=num_open, num_routers=num_routers)


IDLE_PREFILL = Member(WorkerId("prefill-0"), Epoch(1), Role.PREFILL, "127.0.0.1:1")


async def test_an_empty_worker_ends_once_its_last_router_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "_ROUTERS_S", 60.0)
    reports = [report(2, 3), report(0, 3), report(1, 2), report(0, 1), report(0, 0)]
    view = ScriptedView(reports)
    await Drain(IDLE_PREFILL, 50.0, 64, view).run()
    assert view.num_given == len(reports)


async def test_a_request_that_arrives_as_the_last_router_leaves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "_ROUTERS_S", 60.0)
    view = ScriptedView([report(0, 1), report(0, 0), report(1, 0), report(0, 0)], at_once_after=2)
    await Drain(IDLE_PREFILL, 50.0, 64, view).run()
    assert view.num_given == len(view.reports)


@pytest.mark.parametrize("num_routers", [2, None])
async def test_an_empty_worker_does_not_wait_for_frozen_routers(
    num_routers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "_ROUTERS_S", 0.05)
    drain = Drain(IDLE_PREFILL, 50.0, 64, ScriptedView([report(0, num_routers)]))
    await drain.run()
    assert drain.progress.num_cut_short == 0
    assert drain.progress.stage is DrainStage.STOPPING


async def test_a_report_that_came_during_migrations_is_not_waited_for_again() -> None:
    world = World()
    await world.ready()
    reports = world.controller.reports
    (member,) = (each for each in world.controller.membership.members if each.worker_id == "decode-0")
    before = reports.load_of(member)
    world.processes["decode-0", 1].report(worker_pb2.Load())
    await asyncio.wait_for(reports.next_report(member, before), 60)  # there is a newer one already
    waiting = asyncio.create_task(reports.next_report(member, reports.load_of(member)))
    await until(lambda: reports.is_awaited)
    assert not waiting.done()
    world.processes["decode-0", 1].report(worker_pb2.Load())
    await asyncio.wait_for(waiting, 60)
    await world.controller.stop()


# Rounds of migrations between fake decode workers.


@dataclass
class FakeDecode(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.DecodeWorkerServicer):
    """Lets sequences migrate away; those listed in `stubborn` migrate only at the second attempt."""

    sequences: dict[str, int] = field(default_factory=dict)  # tokens of each sequence
    stubborn: set[str] = field(default_factory=set)
    asked: list[worker_pb2.MigrateRequest] = field(default_factory=list)
    kv_digest: str = "same"

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        return worker_pb2.WorkerDescription(page_size=16, kv_digest=self.kv_digest)

    async def ListSequences(
        self, request: worker_pb2.ListSequencesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ListSequencesResponse:
        listed = [
            worker_pb2.RunningSequence(request_id=name, num_tokens=tokens, num_tokens_left=100)
            for name, tokens in self.sequences.items()
        ]
        return worker_pb2.ListSequencesResponse(sequences=listed)

    async def Migrate(
        self, request: worker_pb2.MigrateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.MigrateResponse:
        self.asked.append(request)
        response = worker_pb2.MigrateResponse()
        for name in request.request_ids:
            if name in self.stubborn:
                self.stubborn.discard(name)
                response.failed.add(request_id=name, error=to_status(InvalidInput("test", "not yet")))
            else:
                del self.sequences[name]
                response.migrated.append(name)
        return response


@contextlib.asynccontextmanager
async def serving(fake: FakeDecode) -> AsyncIterator[str]:
    names = worker_pb2.DESCRIPTOR.services_by_name
    server = GrpcServer([names["Worker"], names["DecodeWorker"]])
    worker_pb2_grpc.add_WorkerServicer_to_server(fake, server.server)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(fake, server.server)
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.stop()


@dataclass
class FakeView:
    """Answers each wait for a report at once."""

    source: FakeDecode
    everyone: list[Member]
    free_pages: int = 100

    def is_here(self, member: Member) -> bool:
        return True

    def load_of(self, member: Member) -> worker_pb2.Load:
        num_open = len(self.source.sequences) if member.epoch == 1 else 0
        return worker_pb2.Load(num_open=num_open, num_routers=0, free_pages=self.free_pages)

    def members(self, role: Role) -> list[Member]:
        return [each for each in self.everyone if each.role is role]

    async def next_report(self, member: Member, seen: worker_pb2.Load | None) -> None:
        await asyncio.sleep(0)


async def test_rounds_of_migrations_empty_a_decode_worker() -> None:
    source = FakeDecode({"a": 100, "b": 20, "c": 500}, stubborn={"b"})
    other, strange = FakeDecode(), FakeDecode(kv_digest="another")
    async with serving(source) as address, serving(other) as to_other, serving(strange) as to_strange:
        member = Member(WorkerId("decode-0"), Epoch(1), Role.DECODE, address)
        members = [
            member,
            Member(WorkerId("decode-1"), Epoch(2), Role.DECODE, to_other),
            Member(WorkerId("decode-2"), Epoch(3), Role.DECODE, to_strange),
        ]
        drain = Drain(member, 20.0, 64, FakeView(source, members))
        await drain.run()
    assert source.sequences == {}
    # The third worker's KV has another layout.
    assert {request.address for request in source.asked} == {to_other}
    assert {request.source_address for request in source.asked} == {address}  # the address in the membership
    assert list(source.asked[0].request_ids) == ["b", "a", "c"]
    assert (drain.progress.num_migrated, drain.progress.num_failed_migrations, drain.progress.num_cut_short) == (
        3,
        1,
        0,
    )
    assert drain.progress.stage is DrainStage.STOPPING


async def test_a_sequence_that_fits_nowhere_stays_until_the_timeout() -> None:
    source = FakeDecode({"large": 500, "small": 30})
    async with serving(source) as address, serving(FakeDecode()) as to_other:
        member = Member(WorkerId("decode-0"), Epoch(1), Role.DECODE, address)
        members = [member, Member(WorkerId("decode-1"), Epoch(2), Role.DECODE, to_other)]
        drain = Drain(member, 2.0, 64, FakeView(source, members, free_pages=6))
        seen = [drain.progress]

        async def collect() -> None:
            async for progress in drain.follow():
                seen.append(progress)

        following = asyncio.create_task(collect())
        await drain.run()
        drain.end()
        await following
    assert list(source.sequences) == ["large"]
    assert seen[-1].num_cut_short == 1
    assert any("1 running sequences have no room elsewhere" in progress.detail for progress in seen)


# Output for operators.


async def test_the_admin_service_streams_a_drain_and_refuses_an_unknown_worker() -> None:
    from cluster.controller.admin_service import start_admin_server

    world = World()
    await world.ready()
    server, address = await start_admin_server(world.controller, "127.0.0.1", 0)
    try:
        async with make_channel(address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Drain(admin_pb2.DrainRequest(worker_id="nobody")).read()
            assert isinstance(from_rpc_error(caught.value), InvalidInput)
            call = stub.Drain(admin_pb2.DrainRequest(worker_id="prefill-0", timeout_s=0.1), timeout=60)
            lines = [format_drain(progress) async for progress in call]
    finally:
        await server.stop()
        await world.controller.stop()
    assert lines[0] == "prefill-0 takes no new requests; 0 left, 0 migrated"
    assert lines[-1].startswith("prefill-0 has ended after ")


def test_each_drain_stage_is_described_in_words() -> None:
    def describe(**fields: object) -> str:
        return format_drain(admin_pb2.DrainProgress(worker_id="decode-1", **fields))  # type: ignore[arg-type]

    assert describe(stage="draining", num_left=3, num_migrated=2, detail="1 ends here") == (
        "decode-1 takes no new requests; 3 left, 2 migrated (1 ends here)"
    )
    assert describe(stage="stopping", num_migrated=5) == "decode-1 is empty, 5 migrated; stopping it now"
    assert describe(stage="stopping", num_pages_handed=7) == (
        "decode-1 is empty, 0 migrated and 7 cached pages handed over; stopping it now"
    )
    assert "was not empty in time" in describe(stage="stopping", num_cut_short=1)
    assert describe(stage="ended", elapsed_s=1.26) == "decode-1 has ended after 1.3 s"
    assert json.dumps(DrainProgress().stage) == '"draining"'
