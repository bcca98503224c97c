"""Nodes that go: what to do in the time that is left, and controllers that are told of one. No Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.evacuating import Evacuation
from cluster.node_leave import Notice, Resident, Step, Verdict, decide, empty_from_s
from penstock.errors import InvalidInput
from penstock.types import Role
from penstock.v1 import worker_pb2
from tests.test_cluster_controller import World, worker
from tests.test_cluster_drain import until

seconds_ = st.floats(0.0, 600.0)
residents_ = st.builds(Resident, st.integers(0, 300), st.booleans(), st.booleans())


@given(resident=residents_, given_s=seconds_, within_s=seconds_, passed_s=seconds_, patience_s=seconds_)
def test_emptying_has_its_part_of_the_time_and_the_successor_the_rest(
    resident: Resident, given_s: float, within_s: float, passed_s: float, patience_s: float
) -> None:
    notice, now_s = Notice("node", given_s, given_s + within_s), given_s + passed_s
    step = decide(resident, notice, patience_s, now_s)
    latest_s = empty_from_s(resident.num_open, notice)
    assert latest_s is not None
    assert given_s + within_s / 2 - 1e-6 <= latest_s <= given_s + within_s
    if resident.successor_ready:
        assert step.verdict is Verdict.EMPTY
    elif not resident.others_serve:
        assert step == Step(Verdict.WAIT)  # it serves until its node goes
    else:
        assert (step.verdict is Verdict.EMPTY) == (now_s >= latest_s)
        assert step.verdict is Verdict.EMPTY or step.until_s == latest_s
    busier = replace(resident, num_open=resident.num_open + 50)
    later = empty_from_s(busier.num_open, notice)
    assert later is not None
    assert later <= latest_s  # more to move, sooner


@given(resident=residents_, passed_s=seconds_, patience_s=seconds_)
def test_without_a_deadline_a_successor_gets_as_long_as_a_worker_may_take(
    resident: Resident, passed_s: float, patience_s: float
) -> None:
    step = decide(resident, Notice("node", 0.0), patience_s, passed_s)
    waits = not resident.successor_ready and (not resident.others_serve or passed_s < patience_s)
    assert (step.verdict is Verdict.WAIT) == waits


class FakeNodes:
    def __init__(self) -> None:
        self.note: Callable[[Sequence[Notice]], None] = lambda notices: None

    async def watch(self, note: Callable[[Sequence[Notice]], None]) -> None:
        self.note = note
        await asyncio.get_running_loop().create_future()

    async def leave(self, name: str, within_s: float | None) -> Notice:
        now_s = time.monotonic()
        return Notice(name, now_s, None if within_s is None else now_s + within_s, "an operator drains it")


def going(node: str, within_s: float | None = None) -> list[Notice]:
    now_s = time.monotonic()
    return [Notice(node, now_s, None if within_s is None else now_s + within_s, "spot")]


async def world_of_two_nodes() -> tuple[World, FakeNodes]:
    nodes = FakeNodes()
    world = World(nodes=nodes)
    world.node_of = {"prefill-0": "a", "decode-0": "a", "decode-1": "b"}
    await world.ready()
    await world.until(lambda status: all(one.state == "ready" for one in status.workers))
    return world, nodes


async def become_idle(world: World, name: str) -> None:
    process = world.processes[name, 1]
    while not process.stopped:
        await until(lambda: world.controller.reports.is_awaited or process.stopped)
        process.report(worker_pb2.Load(num_open=0))


async def test_a_successor_is_there_before_a_worker_of_a_node_that_goes_is_emptied() -> None:
    world, nodes = await world_of_two_nodes()
    world.may_start.clear()
    nodes.note(going("b", within_s=600.0))
    nodes.note(going("b", within_s=700.0))  # told again: nothing new
    await until(lambda: ("decode-2", 1) in world.processes)
    status = world.controller.status()
    assert worker(status, "decode-1").state == "ready"  # it serves
    assert worker(status, "decode-2").detail == "beside decode-1, whose node goes"
    # A controller that is made anew now would drain it, and come back to the same size.
    record = world.records[-1]
    assert (record.replicas["decode"], dict(record.leaving)) == (2, {"decode-1": False})
    world.node_of["decode-2"] = "a"
    world.may_start.set()
    await world.until(lambda status: worker(status, "decode-1").state == "draining")
    await become_idle(world, "decode-1")
    status = await world.until(lambda status: len(status.workers) == 4)
    assert {one.member.worker_id for one in status.workers} == {"prefill-0", "decode-0", "decode-2", "router-0"}
    assert world.controller.replicas("decode") == 2
    assert ("decode-1", 2) not in world.processes
    assert dict(world.records[-1].leaving) == {}
    told = [event for event in world.controller.events.after(0) if event.what == "leaving"]
    assert [event.subject for event in told] == ["node b"]
    await world.controller.stop()


async def test_a_worker_whose_successor_finds_no_place_is_emptied_while_there_is_time() -> None:
    world, _ = await world_of_two_nodes()
    world.unplaced["decode-2"] = "no room"
    (evacuation,) = await world.controller.drain_node("b", within_s=1.0)
    assert isinstance(evacuation, Evacuation)
    idle = asyncio.create_task(become_idle(world, "decode-1"))
    stages = [progress.stage.value async for progress in evacuation.follow()]
    await idle
    assert list(dict.fromkeys(stages)) == ["waiting", "draining", "stopping", "ended"]
    assert worker(world.controller.status(), "decode-2").state == "unplaced"
    assert world.controller.replicas("decode") == 2
    await world.controller.stop()


async def test_a_worker_that_is_lost_before_is_not_replaced_twice() -> None:
    world, nodes = await world_of_two_nodes()
    world.may_start.clear()
    nodes.note(going("b"))
    await until(lambda: ("decode-2", 1) in world.processes)
    world.processes["decode-1", 1].lose("the node went")
    status = await world.until(lambda status: len(status.workers) == 4)
    assert "decode-1" not in {one.member.worker_id for one in status.workers}
    world.may_start.set()
    await world.until(lambda status: worker(status, "decode-2").state == "ready")
    assert world.controller.replicas("decode") == 2
    assert ("decode-1", 2) not in world.processes
    await world.controller.stop()


async def test_nothing_is_moved_to_a_worker_whose_node_goes() -> None:
    world, nodes = await world_of_two_nodes()
    world.may_start.clear()
    members = world.controller.reports.members
    assert [one.worker_id for one in members(Role.DECODE)] == ["decode-0", "decode-1"]
    nodes.note(going("b"))
    assert [one.worker_id for one in members(Role.DECODE)] == ["decode-0"]
    watch = await anext(world.controller.watch_membership())
    assert "decode-1" in {one.worker_id for one in watch.members}  # it still serves
    nodes.note([*going("b"), *going("a")])
    assert [one.worker_id for one in members(Role.DECODE)] == ["decode-0", "decode-1"]  # there is nobody else
    await world.controller.stop()


async def test_a_deployment_without_nodes_says_so() -> None:
    world = World()
    await world.ready()
    with pytest.raises(InvalidInput, match="has one machine"):
        await world.controller.drain_node("b")
    await world.controller.stop()
