"""Tests the leases of workers and routers against small gRPC servers that the test silences or replaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2
from hypothesis import given
from hypothesis import strategies as st

from cluster.health import liveness, silence_policy
from cluster.health.liveness import follow_router, follow_worker
from cluster.health.silence_policy import TICK_S, SilenceClock
from penstock.rpc.server import GrpcServer
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc


@pytest.fixture(autouse=True)
def _leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the intervals of heartbeats and probes, and loses nobody for being slow."""
    monkeypatch.setattr(liveness, "ASK_AFTER_S", 0.1)
    monkeypatch.setattr(silence_policy, "DOUBT_AFTER_S", 60.0)
    monkeypatch.setattr(silence_policy, "LOST_AFTER_S", 60.0)
    monkeypatch.setattr(liveness, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(liveness, "_CONNECT_TIMEOUT_S", 30.0)  # a refusal may also come late


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks often, so that no single look counts for as long as the shortened limits of silence are apart."""
    for module in (liveness, silence_policy):
        monkeypatch.setattr(module, "TICK_S", 0.02)
    monkeypatch.setattr(silence_policy, "_MOST_S", 0.04)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Receives every status that a health service sends as its answer to a probe."""
    sent: asyncio.Queue[int] = asyncio.Queue()
    check = health.aio.HealthServicer.Check

    async def recorded(
        service: health.aio.HealthServicer, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        answer = await check(service, request, context)
        sent.put_nowait(answer.status)
        return answer

    monkeypatch.setattr(health.aio.HealthServicer, "Check", recorded)
    return sent


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.epoch = 5
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_streams = 0
        self.reopened = asyncio.Event()
        self.was_asked = asyncio.Event()

    async def WatchEvents(
        self, request: worker_pb2.WatchEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        self.num_streams += 1
        if self.num_streams > 1:
            self.reopened.set()
        while True:
            await self.speaks.wait()
            yield worker_pb2.EventBatch(epoch=self.epoch, load=worker_pb2.Load(num_running=self.num_streams))
            await asyncio.sleep(0.05)

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        self.was_asked.set()
        await self.answers.wait()
        return worker_pb2.WorkerDescription(epoch=self.epoch)


class Followed:
    """Runs a worker on a free port and the task that follows it."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.loads: asyncio.Queue[worker_pb2.Load] = asyncio.Queue()
        self.doubts: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> Followed:
        self.server = GrpcServer([worker_pb2.DESCRIPTOR.services_by_name["Worker"]])
        worker_pb2_grpc.add_WorkerServicer_to_server(self.worker, self.server.server)
        port = await self.server.start("127.0.0.1", 0)
        self.task = asyncio.create_task(
            follow_worker(f"127.0.0.1:{port}", Epoch(5), self.loads.put_nowait, self.doubts.put_nowait)
        )
        await self.load_of(stream=1)
        return self

    async def load_of(self, stream: int) -> None:
        async with asyncio.timeout(60):
            while (await self.loads.get()).num_running < stream:
                continue

    async def question(self) -> None:
        """Waits until the worker is asked for a sign of life. Fails if the worker is lost before."""
        async with asyncio.timeout(60):
            self.worker.was_asked.clear()
            asked = asyncio.create_task(self.worker.was_asked.wait())
            await asyncio.wait((asked, self.task), return_when=asyncio.FIRST_COMPLETED)
        assert not self.task.done(), self.task.result()

    async def reason(self) -> str:
        return await asyncio.wait_for(self.task, 60)

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        self.worker.speaks.set()
        self.worker.answers.set()
        await self.server.stop(0)


async def test_a_silent_worker_that_still_answers_is_not_lost() -> None:
    async with Followed() as followed:
        followed.worker.speaks.clear()
        await asyncio.wait_for(followed.worker.reopened.wait(), 60)
        assert not followed.task.done()
        followed.worker.speaks.set()
        await followed.load_of(stream=2)


@pytest.mark.usefixtures("short_looks")
async def test_a_frozen_worker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_policy, "DOUBT_AFTER_S", 0.2)
    monkeypatch.setattr(silence_policy, "LOST_AFTER_S", 0.4)
    async with Followed() as followed:
        followed.worker.speaks.clear()
        followed.worker.answers.clear()
        assert await asyncio.wait_for(followed.doubts.get(), 60) == "no sign of life for 0.2 s"
        assert not followed.task.done()
        assert await followed.reason() == "no sign of life for 0.1 s, and then DEADLINE_EXCEEDED: Deadline Exceeded"


async def test_a_frozen_worker_that_wakes_in_time_is_trusted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_policy, "DOUBT_AFTER_S", 0.2)
    async with Followed() as followed:
        followed.worker.speaks.clear()
        followed.worker.answers.clear()
        assert await asyncio.wait_for(followed.doubts.get(), 60)
        followed.worker.speaks.set()
        followed.worker.answers.set()
        assert await asyncio.wait_for(followed.doubts.get(), 60) == ""
        await followed.load_of(stream=2)
        assert not followed.task.done()


async def test_a_dead_worker_is_lost_without_waiting_for_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ASK_AFTER_S", 60.0)
    for limit in ("DOUBT_AFTER_S", "LOST_AFTER_S"):
        monkeypatch.setattr(silence_policy, limit, 60.0)
    async with Followed() as followed:
        await followed.server.stop(0)
        assert "UNAVAILABLE" in await followed.reason()


async def test_another_epoch_on_the_same_port_is_a_loss() -> None:
    async with Followed() as followed:
        followed.worker.epoch = 6
        assert "another incarnation answers" in await followed.reason()


async def test_a_router_is_followed_whatever_its_health_until_it_ends(probes: asyncio.Queue[int]) -> None:
    server, doubts = GrpcServer([]), list[str]()
    port = await server.start("127.0.0.1", 0)
    task = asyncio.create_task(follow_router(f"127.0.0.1:{port}", doubts.append))
    async with asyncio.timeout(60):
        for _ in range(2):  # the second probe shows that the first answer ended nothing
            assert await probes.get() == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        for _ in range(2):
            while await probes.get() != health_pb2.HealthCheckResponse.SERVING:
                continue
    assert not task.done()
    await server.stop(0)
    assert "its health service does not answer: UNAVAILABLE" in await asyncio.wait_for(task, 60)


async def test_a_router_that_no_longer_listens_but_runs_has_time_to_end(probes: asyncio.Queue[int]) -> None:
    server, doubts = GrpcServer([]), asyncio.Queue[str]()
    port = await server.start("127.0.0.1", 0)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        following = follow_router(f"127.0.0.1:{port}", doubts.put_nowait, process.pid, drain_s=60.0)
        task = asyncio.create_task(following)
        await asyncio.wait_for(probes.get(), 60)
        await server.stop(0)
        assert "asked to end" in await asyncio.wait_for(doubts.get(), 60)
        assert not task.done()
    finally:
        process.kill()
    assert "UNAVAILABLE" in await asyncio.wait_for(task, 60)
    await process.wait()


async def test_a_killed_router_is_lost_at_once_although_it_is_a_zombie(probes: asyncio.Queue[int]) -> None:
    server, doubts = GrpcServer([]), list[str]()
    port = await server.start("127.0.0.1", 0)
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    task = asyncio.create_task(follow_router(f"127.0.0.1:{port}", doubts.append, process.pid, drain_s=60.0))
    await asyncio.wait_for(probes.get(), 60)
    await server.stop(0)
    assert "UNAVAILABLE" in await asyncio.wait_for(task, 60)
    assert not any("asked to end" in doubt for doubt in doubts)


@pytest.mark.usefixtures("short_looks")
async def test_a_worker_is_not_lost_while_its_follower_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may leave the controller itself without a core, and its timers then say nothing about the
    worker."""
    monkeypatch.setattr(silence_policy, "LOST_AFTER_S", 0.8)
    async with Followed() as followed:
        followed.worker.speaks.clear()
        followed.worker.answers.clear()
        await followed.question()
        time.sleep(0.9)  # noqa: ASYNC251 - the loop stands still, longer than the lease and the question's deadline
        await followed.question()
        followed.worker.speaks.set()
        followed.worker.answers.set()
        await followed.load_of(stream=2)
        assert not followed.task.done()


def silent_after(looks: list[float]) -> float:
    clock = SilenceClock(0.0)
    return [clock.look(now_s) for now_s in looks][-1]


def test_time_between_distant_looks_does_not_count_as_silence() -> None:
    assert silent_after([0.2, 0.4, 0.6]) == pytest.approx(0.6)
    assert silent_after([0.2, 60.2, 60.4]) == pytest.approx(0.2 + 2 * TICK_S + 0.2)
    clock = SilenceClock(0.0)
    clock.look(0.4)
    clock.hear(0.5)
    assert clock.look(0.6) == pytest.approx(0.1)


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=50))
def test_counted_silence_never_exceeds_the_elapsed_time(gaps_s: list[float]) -> None:
    clock, now_s = SilenceClock(0.0), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        assert clock.look(now_s) <= now_s + 1e-6
    assert clock.silent_s <= len(gaps_s) * 2 * TICK_S + 1e-6
