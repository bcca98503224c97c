"""Tests spares: workers that start take them, later spares replace them, and silent workers get one. Processes are
fake.

`tests/cluster/ray/test_nodes.py` and the benchmark have real processes.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.controller import supervisor
from cluster.controller.composition import make_controller
from cluster.controller.supervised_process import FoundProcess, Started
from cluster.health.canary_check import CanaryCheck
from cluster.health.canary_policy import CanaryJudge
from cluster.local.role_host import RoleHost
from cluster.pools.pool import Incarnation, Slot, WorkerState
from cluster.pools.pool_policy import choose_num_spares
from cluster.pools.spares import FIRST_RETRY_S
from cluster.ray.recovery import newest, parse_name
from penstock.config import EngineConfig, PoolConfig, ServeConfig, TransferConfig, WorkerConfig
from penstock.errors import Unavailable
from penstock.rpc.server import make_channel
from penstock.types import Epoch, Member, Role, WorkerId
from penstock.v1 import admin_pb2
from tests.cluster.controller.test_controller import CONFIG, FakeProcess, World, worker
from tests.support.engine.checkpoints import make_checkpoint


class Warmable(FakeProcess):
    """Stands in for a worker, a router, or a spare that becomes a worker when it is flipped."""

    async def start(self) -> Started:
        started = await super().start()
        return Started(Epoch(0), "", 5000) if self.incarnation.spare_of else started

    async def flip(self, incarnation: Incarnation) -> Started:
        if self.incarnation.worker_id in self.world.broken:
            raise Unavailable("it is of no use")
        self.world.num_started += 1
        return Started(Epoch(self.world.num_started), f"{incarnation.worker_id}:1", 5000)


class SpareWorld(World):
    def __init__(self, spares: int) -> None:
        super().__init__()
        self.broken: set[str] = set()
        config = CONFIG.model_copy(update={"decode_pool": PoolConfig(replicas=2, spares=spares)})
        self.controller = make_controller(config, self.spawn, self.canary)

    def spawn(self, incarnation: Incarnation, config: ServeConfig) -> Warmable:
        key = (incarnation.worker_id, 1 if incarnation.spare_of else incarnation.number)
        process = self.processes[key] = Warmable(self, incarnation)
        return process

    async def warm(self, name: str) -> admin_pb2.StatusResponse:
        return await self.until(lambda status: [(each.name, each.state) for each in status.spares] == [(name, "warm")])

    def logged(self, subject: str) -> list[str]:
        return [event.what for event in self.controller.events.after(0) if event.subject == subject]


async def test_the_spare_replaces_a_lost_worker_and_another_one_warms_up() -> None:
    world = SpareWorld(spares=1)
    await world.ready()
    before = await world.warm("decode-spare-0")
    assert (before.spares[0].pool, before.spares[0].pid) == ("decode", 5000)
    watch = world.controller.membership.watch()
    assert dict((await anext(watch)).spares) == {"decode": 1}  # exported by routers
    await watch.aclose()
    world.processes["decode-1", 1].lose()
    after = await world.until(lambda status: status.spares and status.spares[0].name == "decode-spare-1")
    now = worker(after, "decode-1")
    assert (now.state, now.pid, now.num_restarts) == ("ready", 5000, 1)
    assert now.member.epoch > worker(before, "decode-1").member.epoch
    assert ("decode-1", 2) not in world.processes  # no process was started for it
    assert world.processes["decode-1", 1].killed
    assert not world.processes["decode-spare-0", 1].killed
    assert world.logged("decode-spare-0") == ["starting", "warm", "taken"]
    await world.controller.stop()
    assert all(process.killed for process in world.processes.values())
    assert world.processes["decode-spare-0", 1].stopped  # it drains in order, like any worker


async def test_a_successor_with_its_own_reservation_does_not_wait_for_the_lost_process() -> None:
    world = SpareWorld(spares=1)
    await world.ready()
    await world.warm("decode-spare-0")
    lost, may_go = world.processes["decode-1", 1], asyncio.Event()
    lost.kill = may_go.wait  # type: ignore[method-assign]
    lost.lose()
    await world.until(lambda status: worker(status, "decode-1").num_restarts == 1)
    await world.until(lambda status: worker(status, "decode-1").state == "ready")
    may_go.set()
    await world.controller.stop()


async def test_no_spare_starts_while_workers_start() -> None:
    world = SpareWorld(spares=2)
    world.may_start.clear()
    world.controller.start()
    await world.until(lambda status: len(status.workers) == 4)
    assert not world.controller.status().spares
    world.may_start.set()
    status = await world.until(lambda status: len(status.spares) == 2)
    assert {each.state for each in status.workers} == {"ready"}
    await world.controller.stop()


async def test_a_spare_that_dies_is_replaced() -> None:
    world = SpareWorld(spares=1)
    await world.ready()
    await world.warm("decode-spare-0")
    world.processes["decode-spare-0", 1].lose("its process died")
    await world.warm("decode-spare-1")
    assert world.logged("decode-spare-0") == ["starting", "warm", "lost"]
    assert world.processes["decode-spare-0", 1].killed
    await world.controller.stop()


async def test_spares_that_die_as_soon_as_they_are_warm_are_replaced_ever_later() -> None:
    world = SpareWorld(spares=1)
    await world.ready()
    retries_s = []
    for number in range(4):
        await world.warm(f"decode-spare-{number}")
        lost_s = time.monotonic()
        world.processes[f"decode-spare-{number}", 1].lose("its process died")
        await world.until(lambda status: not any(each.state == "warm" for each in status.spares))
        spares = world.controller.spares
        if (retry_s := spares.next_retry_s(lost_s)) is not None:
            retries_s.append(retry_s - lost_s)
            spares._retry_s[Role.DECODE] = 0.0  # the test does not wait
            spares.reconcile(lost_s, upgrading=False)
    assert [round(wait_s / FIRST_RETRY_S) for wait_s in retries_s] == [0, 1, 2, 4]
    await world.controller.stop()


async def test_a_spare_that_cannot_become_a_worker_leads_to_a_cold_start() -> None:
    world = SpareWorld(spares=1)
    await world.ready()
    await world.warm("decode-spare-0")
    world.broken.add("decode-spare-0")
    world.processes["decode-0", 1].lose()
    await world.until(lambda status: worker(status, "decode-0").pid == 4000 and status.workers[1].num_restarts == 1)
    await world.warm("decode-spare-1")
    assert ("decode-0", 2) in world.processes
    assert world.processes["decode-spare-0", 1].killed
    await world.controller.stop()


async def test_a_silent_worker_gets_a_spare_that_ends_when_it_answers_again() -> None:
    world = SpareWorld(spares=0)
    await world.ready()
    world.processes["decode-1", 1].doubt("no sign of life for 2.3 s")
    await world.warm("decode-spare-0")
    assert world.logged("prefill-spare-0") == []
    world.processes["decode-1", 1].doubt("")
    await world.until(lambda status: not status.spares)
    await world.until(lambda status: world.processes["decode-spare-0", 1].killed)
    assert worker(world.controller.status(), "decode-1").num_restarts == 0
    await world.controller.stop()


async def test_a_silent_worker_is_given_up_once_its_spare_is_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "REPLACE_AFTER_S", supervisor.DOUBT_AFTER_S)
    world = SpareWorld(spares=0)
    await world.ready()
    world.may_start.clear()
    world.processes["decode-1", 1].doubt("no sign of life for 2.3 s")
    await world.until(lambda status: len(status.spares) == 1)
    assert worker(world.controller.status(), "decode-1").state == "silent"  # no spare could replace it yet
    world.may_start.set()
    status = await world.until(lambda status: worker(status, "decode-1").num_restarts == 1)
    status = await world.until(lambda status: worker(status, "decode-1").state == "ready")
    assert worker(status, "decode-1").pid == 5000
    assert not status.spares
    assert world.processes["decode-1", 1].killed
    await world.controller.stop()


async def test_a_stop_while_a_spare_warms_up_ends_it() -> None:
    world = SpareWorld(spares=1)
    await world.ready()
    world.may_start.clear()
    world.processes["decode-0", 1].lose()
    await world.until(lambda status: worker(status, "decode-0").num_restarts == 1)
    await asyncio.wait_for(world.controller.stop(), 60)
    assert all(process.killed for process in world.processes.values())


def test_names_distinguish_spares_from_workers() -> None:
    spare, becomes = Incarnation(WorkerId("decode-spare-3"), 17), Incarnation(WorkerId("decode-0"), 2)
    assert parse_name("decode-spare-3.17") == spare
    assert (spare.spare_of, becomes.spare_of) == ("decode", "")
    assert parse_name("router-spare-0.1") is None
    process = FakeProcess.__new__(FakeProcess)
    idle, taken = FoundProcess(spare, process, None), FoundProcess(becomes, process, None)
    other = Incarnation(WorkerId("decode-spare-4"), 18)
    assert newest({spare: taken, other: FoundProcess(other, process, None)}) == {spare: taken}
    assert newest({spare: idle}) == {}


@given(st.integers(0, 3), st.integers(0, 3), st.lists(st.sampled_from(list(WorkerState)), min_size=1, max_size=6))
def test_the_number_of_spares_follows_the_workers_states(
    configured: int, present: int, states: list[WorkerState]
) -> None:
    slots = [Slot(Incarnation(WorkerId(f"decode-{n}"), 1), state) for n, state in enumerate(states)]
    count = choose_num_spares(configured, present, slots, slots)
    if WorkerState.UNPLACED in states:
        assert count == 0  # an unplaced worker may need the reservation
    elif WorkerState.SILENT in states:
        assert count >= max(1, configured, present)
    elif {WorkerState.WAITING, WorkerState.STARTING, WorkerState.LOST} & set(states):
        assert count == present  # no spare starts beside a starting worker, and none ends that may be needed
    else:
        assert count == configured


async def test_a_warm_process_becomes_a_worker_that_answers(tmp_path: Path) -> None:
    """Runs a real spare: its weights are loaded before it has a role, and after the flip it answers the canary."""
    folder = make_checkpoint("llama", tmp_path)
    engine = EngineConfig(model=str(folder), num_pages=64, max_context=256)
    config = WorkerConfig(worker_id="decode-spare-0", role=Role.DECODE, engine=engine)
    host = RoleHost(config.model_copy(update={"transfer": TransferConfig(transport="shm")}), is_spare=True)
    await host.start()
    assert (host.address, host.epoch) == ("", 0)
    assert await host.wait_idle(0.0)
    await host.flip(WorkerId("decode-4"), Role.DECODE)
    try:
        assert (host.worker_id, host.epoch > 0) == ("decode-4", True)
        member = Member(WorkerId("decode-4"), host.epoch, Role.DECODE, host.address)
        await CanaryCheck(CanaryJudge(), make_channel).check(member, [], [])
    finally:
        await host.stop()
