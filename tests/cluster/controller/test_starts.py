"""Tests that starts are bounded by the machines' room and take no place from a serving worker. The processes are fake.
No Ray."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import pytest

from cluster.controller.supervised_process import OnUnplaced, Started
from cluster.lifecycle.upgrade.gate_policy import UpgradeGate
from cluster.lifecycle.upgrade.rolling_upgrade import UpgradePlan, UpgradeStage
from cluster.lifecycle.upgrade.upgrade_service import Revision
from cluster.pools.capacity_policy import Capacity, WorkerNeed
from cluster.pools.pool import ROUTER, Incarnation
from cluster.pools.resources import NodeResources, ResourceShare
from penstock.config import ServeConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.types import Role
from penstock.v1 import admin_pb2
from tests.cluster.controller.test_controller import FakeProcess, World, worker
from tests.cluster.controller.test_operations import command, served

UPGRADES = "cluster.lifecycle.upgrade.upgrade_service"


class FakeMachines:
    """Stands in for one machine, on which each worker takes a place."""

    def __init__(self, num_places: int, num_cores: float = 2.0) -> None:
        self.num_cores = num_cores
        self.num_places = num_places
        self.needs = dict.fromkeys(Role, WorkerNeed(ResourceShare(1.0, 1)))
        self.is_away = False

    async def read(self, pids: Iterable[int]) -> Capacity:
        if self.is_away:
            raise Unavailable("Ray's head does not answer")
        return Capacity({"n": NodeResources({"CPU": float(self.num_places)}, {})})


class Places:
    """Hands out places in the order of the requests, as Ray does."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, on_unplaced: OnUnplaced) -> None:
        if self.num_free and not self.waiting:
            self.num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        on_unplaced("waits for CPU 1 that others use")
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self.waiting:
                self.waiting.remove(turn)
            else:
                self.give()
            raise

    def give(self) -> None:
        if self.waiting:
            self.waiting.popleft().set_result(None)
        else:
            self.num_free += 1


class PlacedProcess(FakeProcess):
    has_place = False

    async def start(self) -> Started:
        assert isinstance(self.world, BusyWorld)
        self.world.asked_to_start.append(self.incarnation.worker_id)
        return await super().start()

    async def place(self, on_unplaced: OnUnplaced) -> None:
        assert isinstance(self.world, BusyWorld)
        if self.incarnation.pool_name != ROUTER:
            await self.world.places.take(on_unplaced)
            self.has_place = True

    async def kill(self) -> None:
        assert isinstance(self.world, BusyWorld)
        if self.has_place:
            self.has_place = False
            self.world.places.give()
        await super().kill()


class BusyWorld(World):
    def __init__(self, machines: FakeMachines) -> None:
        self.machines, self.places = machines, Places(machines.num_places)
        self.asked_to_start: list[str] = []
        super().__init__(machines=machines)
        self.node_of = {f"{role.value}-{place}": "n" for role in Role for place in range(20)}

    def spawn(self, incarnation: Incarnation, config: ServeConfig) -> FakeProcess:
        process = PlacedProcess(self, incarnation)
        self.processes[incarnation.worker_id, incarnation.number] = process
        return process

    async def all_ready(self) -> None:
        await self.ready()
        await self.until(lambda status: all(each.state == "ready" for each in status.workers))

    async def scale(self, replicas: int, *, force: bool = False) -> None:
        await self.controller.pool_service.refresh()
        self.controller.pool_service.scale("decode", replicas, force=force)


def states(status: admin_pb2.StatusResponse) -> list[str]:
    return [each.state for each in status.workers if each.member.role == "decode"]


async def test_a_scale_beyond_the_room_is_refused_unless_forced() -> None:
    world = BusyWorld(FakeMachines(num_places=4))
    await world.all_ready()
    with pytest.raises(InvalidInput) as raised:
        await world.scale(100)
    assert raised.value.message == (
        "replicas: is 100; the decode pool can have 3 beside 1 prefill worker: each needs CPU 1, and the nodes have "
        "CPU 4 in all; give 3 or fewer, add a node, or ask for less for each worker (num_cpus, num_gpus or resources "
        "of its pool), or give --force: the rest then stays unplaced"
    )
    assert world.controller.pool_service.replicas("decode") == 2
    world.may_start.clear()
    await world.scale(6, force=True)
    status = await world.until(lambda status: "starting" in states(status))
    assert states(status) == ["ready", "ready", "starting", "waiting", "waiting", "waiting"]
    world.may_start.set()
    status = await world.until(lambda status: states(status).count("unplaced") == 3)
    assert states(status)[:3] == ["ready"] * 3
    await world.scale(3)  # a smaller pool never needs room
    await world.until(lambda status: states(status) == ["ready"] * 3)
    assert world.num_started == 5
    await asyncio.wait_for(world.controller.stop(), 60)


async def test_newcomers_wait_while_a_serving_worker_is_silent() -> None:
    world = BusyWorld(FakeMachines(num_places=4))
    await world.all_ready()
    world.processes["decode-0", 1].doubt("no sign of life")
    await world.scale(3)
    status = await world.until(lambda status: len(states(status)) == 3)
    assert states(status) == ["silent", "ready", "waiting"]
    world.processes["decode-0", 1].doubt("")
    await world.until(lambda status: states(status) == ["ready"] * 3)
    await asyncio.wait_for(world.controller.stop(), 60)


async def test_a_lost_workers_successor_gets_a_place_before_earlier_newcomers() -> None:
    world = BusyWorld(FakeMachines(num_places=3, num_cores=64))
    await world.all_ready()
    await world.scale(6, force=True)
    await world.until(lambda status: states(status).count("unplaced") == 4)
    for life in (1, 2):
        for name in ("decode-0", "decode-1"):
            world.processes[name, life].lose("no sign of life for 6 s")
        await world.until(
            lambda status, life=life: all(  # type: ignore[misc]
                (worker(status, name).state, worker(status, name).num_restarts) == ("ready", life)
                for name in ("decode-0", "decode-1")
            )
        )
    status = await world.until(lambda status: states(status).count("unplaced") == 4)
    newcomers = [process for (name, _), process in world.processes.items() if "decode-1" < name < "prefill"]
    assert not any(process.has_place for process in newcomers)  # type: ignore[attr-defined]
    assert worker(status, "decode-2").num_restarts == 0  # it was not lost, because it never had a place
    assert "lost" not in {event.what for event in world.controller.events.after(0) if event.subject == "decode-2"}
    await asyncio.wait_for(world.controller.stop(), 60)
    assert world.places.num_free == 3


async def test_workers_placed_late_start_one_at_a_time() -> None:
    world = BusyWorld(FakeMachines(num_places=3))
    await world.all_ready()
    await world.scale(5, force=True)
    await world.until(lambda status: states(status).count("unplaced") == 3)
    world.may_start.clear()
    world.asked_to_start.clear()
    for _ in range(3):
        world.places.give()  # a node joins
    status = await world.until(lambda status: "starting" in states(status))
    assert sorted(states(status)) == ["ready", "ready", "starting", "waiting", "waiting"]
    assert world.asked_to_start == ["decode-2"]
    world.may_start.set()
    await world.until(lambda status: states(status) == ["ready"] * 5)
    await asyncio.wait_for(world.controller.stop(), 60)


async def test_an_upgrade_needs_room_for_one_more_worker_of_each_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{UPGRADES}.read_revision", lambda folder: Revision("r", "t", 1))
    world = BusyWorld(FakeMachines(num_places=4))
    await world.all_ready()
    plan = UpgradePlan("", UpgradeGate(window_s=60.0))
    with pytest.raises(InvalidInput, match=r"makes 2 in the prefill pool, and 1 fit.*scale a pool down by one first"):
        await world.controller.upgrading.begin(plan)
    assert world.controller.upgrading.current is None
    world.machines.num_places = 5
    upgrade = await world.controller.upgrading.begin(plan)
    world.controller.upgrading.abort()
    stages = [progress.stage async for progress in upgrade.follow()]
    assert stages[-1] is UpgradeStage.ROLLED_BACK
    await asyncio.wait_for(world.controller.stop(), 60)


async def test_a_flip_is_bounded_only_where_the_pools_workers_differ() -> None:
    world = BusyWorld(FakeMachines(num_places=3))
    await world.all_ready()
    pools = world.controller.pool_service
    world.machines.needs[Role.PREFILL] = WorkerNeed(ResourceShare(2.0, 1))
    await pools.refresh()
    with pytest.raises(InvalidInput, match="with decode-1 that pool has 2 workers, and 1 fit"):
        pools.flip("decode-1", Role.PREFILL)
    world.machines.needs[Role.PREFILL] = world.machines.needs[Role.DECODE]
    flip = pools.flip("decode-1", Role.PREFILL)
    assert worker(world.controller.status(), flip.target.worker_id).state == "starting"
    await asyncio.wait_for(world.controller.stop(), 60)


async def test_scale_prints_what_fits_and_takes_force(capsys: pytest.CaptureFixture[str]) -> None:
    machines = FakeMachines(num_places=4)
    async with served(machines) as (world, address):
        assert await command("scale", "decode", "100", "--admin", address) == 2
        error = capsys.readouterr().err
        assert "is 100; the decode pool can have 3 beside 1 prefill worker" in error
        assert "--force" in error
        machines.is_away = True
        assert await command("scale", "decode", "3", "--admin", address) == 2
        assert "Ray's head does not answer" in capsys.readouterr().err
        assert await command("scale", "decode", "1", "--admin", address) == 0  # a smaller pool never needs room
        capsys.readouterr()
        assert await command("scale", "decode", "5", "--force", "--admin", address) == 0
        assert "new workers start a few at a time" in capsys.readouterr().out
        assert world.controller.pool_service.replicas("decode") == 5


async def test_upgrade_is_refused_without_room_unless_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{UPGRADES}.read_revision", lambda folder: Revision("r", "t", 1))
    async with served(FakeMachines(num_places=3)) as (world, address):
        assert await command("upgrade", "--admin", address) == 2
        assert "makes 2 in the prefill pool, and 1 fit" in capsys.readouterr().err
        world.may_start.clear()
        upgrading = asyncio.create_task(command("upgrade", "--force", "--without-evidence", "--admin", address))
        await world.until(lambda status: world.controller.upgrading.current is not None)
        upgrade = world.controller.upgrading.current
        assert upgrade is not None
        assert upgrade.plan.gate.without_evidence
        world.controller.upgrading.abort()
        assert await upgrading == 1
