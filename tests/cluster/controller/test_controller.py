"""Tests the controller over fake processes: starts, losses, membership, readiness, stop. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import pytest

from cluster.controller.admin_service import start_admin_server
from cluster.controller.composition import make_controller
from cluster.controller.record import FIRST_RECORD, ControllerRecord
from cluster.controller.supervised_process import OnUnplaced, Started
from cluster.health.canary_check import ChecksCanary
from cluster.health.liveness import OnDoubt
from cluster.lifecycle.capacity_check import Machines
from cluster.lifecycle.relocation_service import NodeWatch
from cluster.pools.pool import Incarnation
from penstock.config import PoolConfig, ServeConfig
from penstock.errors import CheckpointError, PenstockError, Unavailable
from penstock.types import Epoch, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc, worker_pb2

CONFIG = ServeConfig(model="models/some-model", routers=1, decode_pool=PoolConfig(replicas=2), start_timeout_s=20)


class FakeProcess:
    """Starts once `World.may_start` is set and lives until `lose` is called."""

    def __init__(self, world: World, incarnation: Incarnation) -> None:
        self.world, self.incarnation = world, incarnation
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopped = self.killed = self.distrusted = False

    async def place(self, on_unplaced: OnUnplaced) -> None:
        if reason := self.world.unplaced.get(self.incarnation.worker_id):
            on_unplaced(reason)
            await asyncio.get_running_loop().create_future()

    async def start(self) -> Started:
        await self.world.may_start.wait()
        if self.incarnation.worker_id == self.world.never_starts:
            raise Unavailable("its process died while starting")
        error = self.world.start_errors.pop(self.incarnation.worker_id, None)
        if error:
            raise error
        self.world.num_started += 1
        node = self.world.node_of.get(self.incarnation.worker_id, "")
        name = self.incarnation.worker_id
        return Started(
            Epoch(self.world.num_started), f"{name}:1", 4000, "router:2", node=node, peer_address=f"{name}:3"
        )

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        self.report, self.doubt = on_load, on_doubt
        on_load(worker_pb2.Load(num_running=3))
        return await self.reason

    def lose(self, reason: str = "killed") -> None:
        self.reason.set_result(reason)

    async def stop(self, grace_s: float = 0.0) -> None:
        self.world.stop_order.append(self.incarnation.worker_id)
        self.stopped = True

    async def distrust(self) -> None:
        assert not self.killed, "its pages have been inherited"
        self.distrusted = True

    async def kill(self) -> None:
        self.killed = True


class World:
    """Runs a controller over fake processes, which the test controls."""

    def __init__(
        self,
        canary_check: ChecksCanary | None = None,
        canary_interval_s: float = 60.0,
        nodes: NodeWatch | None = None,
        record: ControllerRecord = FIRST_RECORD,
        routers: int = 1,
        machines: Machines | None = None,
    ) -> None:
        self.node_of: dict[str, str] = {}
        self.records: list[ControllerRecord] = []
        self.processes: dict[tuple[str, int], FakeProcess] = {}
        self.unplaced: dict[str, str] = {}  # reasons for losses, by worker
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_errors: dict[str, PenstockError] = {}
        self.never_starts = ""
        self.canary_error: PenstockError | None = None
        self.num_started = 0
        self.num_canaries = 0
        self.stop_order: list[str] = []
        config = CONFIG.model_copy(update={"canary_interval_s": canary_interval_s, "routers": routers})
        self.controller = make_controller(
            config,
            self.spawn,
            self.canary,
            record=record,
            save=self.records.append,
            canary_check=canary_check,
            nodes=nodes,
            machines=machines,
        )

    def spawn(self, incarnation: Incarnation, config: ServeConfig) -> FakeProcess:
        process = FakeProcess(self, incarnation)
        self.processes[incarnation.worker_id, incarnation.number] = process
        return process

    async def canary(self, address: str) -> None:
        self.num_canaries += 1
        assert address.startswith("router-")
        if self.canary_error:
            raise self.canary_error

    async def until(self, condition: Callable[[admin_pb2.StatusResponse], bool]) -> admin_pb2.StatusResponse:
        version = -1
        async with asyncio.timeout(60):
            while True:
                # A new load changes no version, so the wait times out.
                snapshot = await self.controller.wait(version, 0.2)
                if condition(snapshot.status):
                    return snapshot.status
                version = snapshot.version

    async def ready(self) -> admin_pb2.StatusResponse:
        self.controller.start()
        return await self.until(lambda status: status.ready)


def worker(status: admin_pb2.StatusResponse, worker_id: str) -> admin_pb2.WorkerStatus:
    return next(each for each in status.workers if each.member.worker_id == worker_id)


async def test_ready_means_that_a_request_succeeded() -> None:
    world = World()
    world.may_start.clear()
    world.controller.start()
    status = await world.until(lambda status: len(status.workers) == 4)
    assert {each.state for each in status.workers} == {"starting"}
    assert not status.ready
    world.controller.on_progress(Incarnation(WorkerId("decode-1"), 1), "loading weights 50%")
    assert worker(world.controller.status(), "decode-1").detail == "loading weights 50%"
    world.may_start.set()
    status = await world.until(lambda status: status.ready)
    assert world.num_canaries == 1
    assert list(status.endpoints) == ["grpc://router-0:1", "http://router:2"]
    assert (status.model, worker(status, "prefill-0").pid) == ("some-model", 4000)
    assert worker(status, "decode-0").load.num_running == 3
    await world.controller.stop()


async def test_further_routers_start_once_the_first_one_serves() -> None:
    world = World(routers=3)
    world.may_start.clear()
    world.controller.start()
    status = await world.until(
        lambda status: (
            [worker(status, f"router-{number}").state for number in range(3) if len(status.workers) == 6]
            == ["starting", "unplaced", "unplaced"]
        )
    )
    assert worker(status, "router-2").detail == "starts once the first router serves"
    world.may_start.set()
    await world.until(lambda status: status.ready)
    await world.until(_all_ready)
    world.processes["router-1", 1].lose()  # its successor starts at once
    await world.until(lambda status: worker(status, "router-1").num_restarts == 1 and _all_ready(status))
    await world.controller.stop()


def _all_ready(status: admin_pb2.StatusResponse) -> bool:
    return {each.state for each in status.workers} == {"ready"}


async def test_nodes_are_needed_until_every_worker_is_placed_and_while_one_is_replaced() -> None:
    world = World()
    world.unplaced["decode-1"] = "no node has 8 CPU"
    world.controller.start()
    await world.until(lambda status: any(each.state == "unplaced" for each in status.workers))
    assert not world.controller.is_placed
    world.controller.pool_service.scale("decode", 1)
    await world.until(lambda status: len(status.workers) == 3 and _all_ready(status))
    assert world.controller.is_placed
    world.unplaced["decode-0"] = "no node has 8 CPU"
    world.processes["decode-0", 1].lose()
    assert world.controller.is_placed  # until the loss is noticed
    await world.until(lambda status: worker(status, "decode-0").state == "unplaced")
    assert not world.controller.is_placed
    await world.controller.stop()


async def test_a_lost_worker_leaves_the_membership_and_is_replaced_under_a_new_epoch() -> None:
    world = World()
    await world.ready()
    watch = world.controller.membership.watch()
    before = await anext(watch)
    assert [each.worker_id for each in before.members] == ["prefill-0", "decode-0", "decode-1"]
    world.may_start.clear()
    world.processes["decode-0", 1].lose("its process died")
    without = await asyncio.wait_for(anext(watch), 60)
    assert without.version > before.version
    assert [each.worker_id for each in without.members] == ["prefill-0", "decode-1"]
    status = await world.until(lambda status: worker(status, "decode-0").state == "starting")
    assert worker(status, "decode-0").num_restarts == 1
    assert world.processes["decode-0", 1].killed
    assert world.controller.is_ready  # the other decode worker still serves
    world.may_start.set()
    after = await asyncio.wait_for(anext(watch), 60)
    assert [each.worker_id for each in after.members] == ["prefill-0", "decode-0", "decode-1"]
    assert after.members[1].epoch > max(each.epoch for each in before.members)
    await world.controller.stop()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(watch), 60)


async def test_a_replaced_router_must_prove_itself_again() -> None:
    world = World()
    await world.ready()
    world.canary_error = Unavailable("no workers yet")
    world.processes["router-0", 1].lose()
    await world.until(lambda status: not status.ready)
    await world.until(lambda status: worker(status, "router-0").state == "ready")
    world.canary_error = None
    await world.until(lambda status: status.ready)
    assert worker(world.controller.status(), "router-0").num_restarts == 1
    await world.controller.stop()


async def test_a_checkpoint_that_cannot_be_served_fails_the_deployment() -> None:
    world = World()
    world.start_errors["prefill-0"] = CheckpointError("model-00002.safetensors is missing; copy it")
    world.controller.start()
    version, failure = -1, None
    async with asyncio.timeout(60):
        while failure is None:
            snapshot = await world.controller.wait(version, 5)
            version, failure = snapshot.version, snapshot.failure
    assert isinstance(failure, CheckpointError)
    assert "model-00002.safetensors" in failure.message
    await world.controller.stop()


async def test_a_transient_failure_at_the_start_is_retried() -> None:
    world = World()
    world.start_errors["decode-1"] = Unavailable("its process died while starting")
    status = await world.ready()
    assert worker(status, "decode-1").num_restarts == 1
    assert (await world.controller.wait(-1, 0)).failure is None
    await world.controller.stop()


async def test_a_process_that_never_becomes_ready_fails_the_start_after_three_tries() -> None:
    world = World()
    world.never_starts = "router-0"
    world.controller.start()
    version, failure = -1, None
    async with asyncio.timeout(60):
        while failure is None:
            snapshot = await world.controller.wait(version, 5)
            version, failure = snapshot.version, snapshot.failure
    assert failure.message == "router-0 failed 3 times to start; the last time: its process died while starting"
    await world.controller.stop()


async def test_a_failed_first_request_is_reported() -> None:
    world = World()
    world.canary_error = PenstockError("boom")
    world.controller.start()
    version, failure = -1, None
    async with asyncio.timeout(60):
        while failure is None:
            snapshot = await world.controller.wait(version, 5)
            version, failure = snapshot.version, snapshot.failure
    assert failure.message == "the deployment started, but its first request failed: boom"
    assert not snapshot.status.ready
    await world.controller.stop()


async def test_stop_ends_the_router_first_and_every_process() -> None:
    world = World()
    await world.ready()
    first, second = asyncio.create_task(world.controller.stop()), asyncio.create_task(world.controller.stop())
    await asyncio.wait_for(asyncio.gather(first, second), 60)
    assert world.stop_order[0] == "router-0"
    assert sorted(world.stop_order[1:]) == ["decode-0", "decode-1", "prefill-0"]
    assert all(process.killed for process in world.processes.values())
    assert (await world.controller.wait(10**9, 5)).stopped
    assert len(world.processes) == 4  # nothing was replaced


async def test_a_stop_while_workers_start_ends_them_too() -> None:
    world = World()
    world.may_start.clear()
    world.controller.start()
    await world.until(lambda status: len(world.processes) == 4)
    await asyncio.wait_for(world.controller.stop(), 60)
    assert all(process.killed for process in world.processes.values())


async def test_the_admin_service_exposes_the_controller() -> None:
    world = World()
    await world.ready()
    server, address = await start_admin_server(world.controller, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        status = await stub.Status(admin_pb2.StatusRequest(), timeout=60)
        assert (status.ready, len(status.workers)) == (True, 4)
        watch = stub.WatchMembership(admin_pb2.WatchMembershipRequest(), timeout=60)
        assert len((await watch.read()).members) == 3
        world.processes["decode-1", 1].lose()
        assert len((await watch.read()).members) == 2
        await stub.Stop(admin_pb2.StopRequest(), timeout=60)
        while await watch.read() is not grpc.aio.EOF:
            continue  # the replaced worker joins and leaves
    await server.stop()
