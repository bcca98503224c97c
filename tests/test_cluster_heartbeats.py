"""The lease of a worker and of a router, against small gRPC servers that the test silences or replaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from cluster import heartbeats
from cluster.heartbeats import follow_router, follow_worker
from penstock.grpc_server import GrpcServer
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "ASK_AFTER_S", 0.5)
    monkeypatch.setattr(heartbeats, "DOUBT_AFTER_S", 0.7)
    monkeypatch.setattr(heartbeats, "LOST_AFTER_S", 1.2)
    monkeypatch.setattr(heartbeats, "PROBE_INTERVAL_S", 0.05)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.epoch = 5
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_streams = 0
        self.reopened = asyncio.Event()

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
        await self.answers.wait()
        return worker_pb2.WorkerDescription(epoch=self.epoch)


class Followed:
    """A worker served on a free port, and the task that follows it."""

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
        async with asyncio.timeout(10):
            while (await self.loads.get()).num_running < stream:
                continue

    async def reason(self) -> str:
        return await asyncio.wait_for(self.task, 10)

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        self.worker.speaks.set()
        self.worker.answers.set()
        await self.server.stop(0)


async def test_silence_alone_is_no_loss_while_the_worker_answers() -> None:
    async with Followed() as followed:
        followed.worker.speaks.clear()
        await asyncio.wait_for(followed.worker.reopened.wait(), 10)
        assert not followed.task.done()
        followed.worker.speaks.set()
        await followed.load_of(stream=2)


async def test_a_frozen_worker_is_lost() -> None:
    async with Followed() as followed:
        followed.worker.speaks.clear()
        followed.worker.answers.clear()
        assert await asyncio.wait_for(followed.doubts.get(), 10) == "no sign of life for 0.7 s"
        assert not followed.task.done()
        assert await followed.reason() == "no sign of life for 0.5 s, and then DEADLINE_EXCEEDED: Deadline Exceeded"


async def test_a_frozen_worker_that_wakes_in_time_is_trusted_again() -> None:
    async with Followed() as followed:
        followed.worker.speaks.clear()
        followed.worker.answers.clear()
        assert await asyncio.wait_for(followed.doubts.get(), 10)
        followed.worker.speaks.set()
        followed.worker.answers.set()
        assert await asyncio.wait_for(followed.doubts.get(), 10) == ""
        await followed.load_of(stream=2)
        assert not followed.task.done()


async def test_a_dead_worker_is_lost_at_once() -> None:
    async with Followed() as followed:
        stopped_s = asyncio.get_running_loop().time()
        await followed.server.stop(0)
        assert "UNAVAILABLE" in await followed.reason()
        assert asyncio.get_running_loop().time() - stopped_s < 1.5


async def test_another_incarnation_on_the_same_port_is_a_loss() -> None:
    async with Followed() as followed:
        followed.worker.epoch = 6
        assert "another incarnation answers" in await followed.reason()


async def test_a_router_is_followed_whatever_its_health_says_until_it_is_gone() -> None:
    server, doubts = GrpcServer([]), list[str]()
    port = await server.start("127.0.0.1", 0)
    task = asyncio.create_task(follow_router(f"127.0.0.1:{port}", doubts.append))
    await asyncio.sleep(0.3)
    await server.set_serving(True)
    await asyncio.sleep(0.1)
    assert not task.done()
    await server.stop(0)
    assert "its health service does not answer: UNAVAILABLE" in await asyncio.wait_for(task, 10)


async def test_a_router_that_listens_no_more_but_runs_was_told_to_end_and_has_its_time() -> None:
    server, doubts = GrpcServer([]), list[str]()
    port = await server.start("127.0.0.1", 0)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        following = follow_router(f"127.0.0.1:{port}", doubts.append, process.pid, drain_s=60.0)
        task = asyncio.create_task(following)
        await asyncio.sleep(0.2)
        await server.stop(0)
        async with asyncio.timeout(10):
            while not doubts:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
        assert "told to end" in doubts[-1]
        assert not task.done()
    finally:
        process.kill()
    assert "UNAVAILABLE" in await asyncio.wait_for(task, 10)
    await process.wait()


async def test_a_killed_router_is_lost_at_once_though_its_corpse_is_there() -> None:
    server, doubts = GrpcServer([]), list[str]()
    port = await server.start("127.0.0.1", 0)
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    task = asyncio.create_task(follow_router(f"127.0.0.1:{port}", doubts.append, process.pid, drain_s=60.0))
    await asyncio.sleep(0.2)
    await server.stop(0)
    assert "UNAVAILABLE" in await asyncio.wait_for(task, 10)
    assert not any("told to end" in doubt for doubt in doubts)
