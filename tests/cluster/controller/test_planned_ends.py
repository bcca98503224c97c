"""Tests that a planned end is never reported as a loss: in the event log, the log, the status and exported metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from cluster.controller.supervised_process import Started
from cluster.pools.pool import Incarnation
from penstock.config import ServeConfig
from penstock.errors import Unavailable
from penstock.types import Epoch, Role, WorkerEnd
from penstock.v1 import admin_pb2, worker_pb2
from router.metrics.metrics import RouterMetrics
from tests.cluster.controller.test_controller import FakeProcess, World, worker


class FlippingProcess(FakeProcess):
    async def flip(self, incarnation: Incarnation) -> Started:
        self.incarnation = incarnation
        self.world.num_started += 1
        return Started(Epoch(self.world.num_started), f"{incarnation.worker_id}:1", 4000)


class LoggedWorld(World):
    """Runs a controller whose processes can flip."""

    def spawn(self, incarnation: Incarnation, config: ServeConfig) -> FakeProcess:
        process = FlippingProcess(self, incarnation)
        self.processes[incarnation.worker_id, incarnation.number] = process
        return process

    async def idle_until(self, condition: Callable[[admin_pb2.StatusResponse], bool]) -> set[str]:
        """Reports idle workers until the condition holds; returns each worker state that the status showed."""
        shown = set()
        async with asyncio.timeout(60):
            while True:
                status = self.controller.status()
                shown |= {each.state for each in status.workers}
                if condition(status):
                    return shown
                for process in self.processes.values():
                    if hasattr(process, "report"):
                        process.report(worker_pb2.Load(num_open=0, num_routers=0))
                await asyncio.sleep(0)

    def ends(self) -> list[tuple[str, str]]:
        words = {end.value for end in WorkerEnd} | {"lost", "gone"}
        return [(event.subject, event.what) for event in self.controller.events.after(0) if event.what in words]


async def drain(world: LoggedWorld) -> None:
    world.controller.draining.drain("decode-1")


async def scale_down(world: LoggedWorld) -> None:
    world.controller.pool_service.scale("decode", 1)


async def flip(world: LoggedWorld) -> None:
    world.controller.pool_service.flip("decode-1", Role.PREFILL)


async def terminate(world: LoggedWorld) -> None:
    world.processes["decode-1", 1].report(worker_pb2.Load(leaving=True))


async def drain_and_replace(world: LoggedWorld) -> None:
    world.controller.draining.drain("decode-1", replaced=True)


@pytest.mark.parametrize(
    ("change", "end", "size"),
    [
        (drain, WorkerEnd.DRAINED, 1),
        (drain_and_replace, WorkerEnd.DRAINED, 2),
        (scale_down, WorkerEnd.SCALED_DOWN, 1),
        (flip, WorkerEnd.FLIPPED, 1),
        (terminate, WorkerEnd.TERMINATED, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_a_planned_end_is_reported_under_its_own_name(
    change: Callable[[LoggedWorld], Awaitable[None]], end: WorkerEnd, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = LoggedWorld()
    await world.ready()
    await world.until(lambda status: all(each.state == "ready" for each in status.workers))
    watch = world.controller.membership.watch()
    await change(world)
    status = await world.until(lambda status: "draining" in {each.state for each in status.workers})
    leaving = worker(status, first_leaving(world))
    assert (leaving.state, leaving.detail) == ("draining", f"to be {end.value}")

    def is_over(status: admin_pb2.StatusResponse) -> bool:
        sizes = [each.state for each in status.workers if each.member.role == "decode"]
        return bool(world.ends()) and sizes == ["ready"] * size and "starting" not in {w.state for w in status.workers}

    shown = await world.idle_until(is_over)
    assert shown <= {"ready", "draining", "ending", "starting", "waiting"}
    assert [what for _, what in world.ends()] == [end.value]
    assert "lost" not in caplog.text
    membership = await asyncio.wait_for(anext(watch), 60)
    assert dict(membership.ends) == {end.value: 1}
    await asyncio.wait_for(world.controller.stop(), 60)
    assert {what for _, what in world.ends()} == {end.value, WorkerEnd.STOPPED.value}
    assert "lost" not in caplog.text


def first_leaving(world: LoggedWorld) -> str:
    slots = world.controller.pools.worker_slots
    return next(slot.worker_id for slot in slots if slot.is_leaving)


async def test_a_worker_that_dies_during_its_drain_is_lost() -> None:
    world = LoggedWorld()
    await world.ready()
    await world.until(lambda status: all(each.state == "ready" for each in status.workers))
    world.controller.draining.drain("decode-1")
    world.processes["decode-1", 1].lose("its process died")
    await world.until(lambda status: len(status.workers) == 3)
    assert world.ends() == [("decode-1", "lost"), ("decode-1", "gone")]
    assert world.controller.events.ends == {WorkerEnd.DIED: 1}
    await asyncio.wait_for(world.controller.stop(), 60)


def test_routers_export_how_workers_ended() -> None:
    metrics = RouterMetrics("m")
    metrics.watch_ends(lambda how: {"scaled down": 2.0, "died": 1.0}.get(how, 0.0))
    text = metrics.render().decode()
    assert 'penstock:worker_ends{how="scaled down",model_name="m"} 2.0' in text
    assert 'penstock:worker_ends{how="died",model_name="m"} 1.0' in text
    assert 'penstock:worker_ends{how="upgraded",model_name="m"} 0.0' in text


async def test_a_loss_is_counted_by_its_cause() -> None:
    world = LoggedWorld()
    world.start_errors["decode-0"] = Unavailable("its process died while starting")
    await world.ready()
    await world.until(lambda status: all(each.state == "ready" for each in status.workers))
    frozen = world.processes["decode-1", 1]
    frozen.doubt("no sign of life for 2.3 s")
    frozen.lose("no sign of life for 6 s")
    await world.until(lambda _: world.controller.events.ends[WorkerEnd.HUNG] == 1)
    assert world.controller.events.ends == {WorkerEnd.NOT_STARTED: 1, WorkerEnd.HUNG: 1}
    await asyncio.wait_for(world.controller.stop(), 60)
