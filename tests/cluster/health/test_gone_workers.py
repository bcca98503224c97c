"""Tests that workers learn when another worker's machine is dead, and only when that is certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import grpc.aio
import pytest

from cluster.health.gone_workers import GoneWorkers
from cluster.pools.pool import Incarnation, Pools
from penstock.config import ServeConfig
from penstock.rpc.server import GrpcServer, make_channel
from penstock.types import Epoch, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.lifecycle.test_node_leave import world_of_two_nodes

WAIT_S = 60.0


class Nodes:
    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.num_looks = 0

    async def find_dead(self, nodes: Collection[str]) -> Collection[str]:
        self.num_looks += 1
        return self.dead.intersection(nodes)


class Listening(worker_pb2_grpc.WorkerServicer):
    """Stands in for a worker that fails its first calls and records the epochs that it is informed of."""

    def __init__(self, num_failures: int, on_call: Callable[[], None] = lambda: None) -> None:
        self.num_failures = num_failures
        self.on_call = on_call
        self.num_calls = 0
        self.gone: list[int] = []

    async def NoteGone(
        self, request: worker_pb2.NoteGoneRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.NoteGoneResponse:
        self.num_calls += 1
        self.on_call()
        if self.num_failures:
            self.num_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        self.gone += request.epochs
        return worker_pb2.NoteGoneResponse()


async def serve(servicer: Listening) -> tuple[GrpcServer, int]:
    """Returns the server and its port."""
    server = GrpcServer([worker_pb2.DESCRIPTOR.services_by_name["Worker"]])
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.server)
    return server, await server.start("127.0.0.1", 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


@pytest.fixture
def pools() -> Pools:
    made = Pools(ServeConfig(model="m", prefill_pool={"replicas": 2}, decode_pool={"replicas": 1}), {}, {})  # type: ignore[arg-type]
    made.reconcile(0.0)
    return made


async def test_the_others_are_informed_of_a_dead_node_until_they_answer(pools: Pools) -> None:
    nodes, servicer = Nodes(), Listening(num_failures=2)
    server, port = await serve(servicer)
    lost, never_ready = (Incarnation(WorkerId(f"prefill-{number}"), 1) for number in range(2))
    decode = Incarnation(WorkerId("decode-0"), 1)
    pools.of(lost).on_ready(lost, Epoch(11), "10.0.0.1:1", 1, "a")
    pools.of(decode).on_ready(decode, Epoch(12), f"127.0.0.1:{port}", 1, "b")
    gone = GoneWorkers(nodes, pools, make_channel, look_every_s=0.005)
    try:
        gone.on_lost(never_ready)
        assert not gone._tasks, "it has never written anything"
        gone.on_lost(lost)
        await until(lambda: nodes.num_looks > 3)
        assert servicer.gone == [], "a lost worker whose node lives may write"
        nodes.dead = {"a"}
        await until(lambda: not gone._tasks)
        assert (servicer.gone, servicer.num_failures) == ([11], 0)
    finally:
        gone.close()
        await server.stop()


async def test_lost_workers_are_not_informed(pools: Pools) -> None:
    """Neither the lost worker itself, nor another one from the time of its own loss on."""
    nodes = Nodes()
    nodes.dead = {"a"}
    lost, other = (Incarnation(WorkerId(f"prefill-{number}"), 1) for number in range(2))

    def lose_other() -> None:
        pools.of(other).set_replicas(0)
        pools.reconcile(0.0)

    lost_servicer, other_servicer = Listening(num_failures=0), Listening(num_failures=1, on_call=lose_other)
    servers = []
    for incarnation, epoch, servicer in ((lost, 11, lost_servicer), (other, 12, other_servicer)):
        server, port = await serve(servicer)
        servers.append(server)
        pools.of(incarnation).on_ready(incarnation, Epoch(epoch), f"127.0.0.1:{port}", 1, "a")
    gone = GoneWorkers(nodes, pools, make_channel, look_every_s=0.005)
    try:
        gone.on_lost(lost)
        await until(lambda: other_servicer.num_calls > 0 and not gone._tasks)
        assert other_servicer.num_calls == 1, "it was lost during the first call, which failed"
        assert lost_servicer.num_calls == 0
    finally:
        gone.close()
        for server in servers:
            await server.stop()


async def test_a_controller_looks_at_the_node_of_each_lost_worker(caplog: pytest.LogCaptureFixture) -> None:
    world, nodes = await world_of_two_nodes()
    nodes.dead = {"b"}
    with caplog.at_level("INFO", logger="cluster.health.gone_workers"):
        world.processes["decode-0", 1].lose()  # its node, a, is alive
        world.processes["decode-1", 1].lose()
        await until(lambda: "node b of lost epoch" in caplog.text)
    assert "node a" not in caplog.text
    await world.controller.stop()
