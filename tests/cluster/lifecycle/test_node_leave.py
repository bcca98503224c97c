"""Tests leaving nodes: the relocation policy, and controllers that are notified. No Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lifecycle.relocation_policy import (
    LeavingWorker,
    NodeNotice,
    RelocationAction,
    RelocationStep,
    controller_move_s,
    decide_relocation,
    latest_drain_start_s,
)
from cluster.lifecycle.relocation_service import Relocation
from penstock.errors import InvalidInput
from penstock.types import Role
from penstock.v1 import worker_pb2
from tests.cluster.controller.test_controller import World, worker
from tests.cluster.lifecycle.test_drain import until

seconds_ = st.floats(0.0, 600.0)
residents_ = st.builds(LeavingWorker, st.integers(0, 300), st.booleans(), st.booleans())


@given(resident=residents_, given_s=seconds_, within_s=seconds_, passed_s=seconds_, patience_s=seconds_)
def test_the_drain_starts_in_the_second_half_of_the_notice_unless_the_successor_is_ready(
    resident: LeavingWorker, given_s: float, within_s: float, passed_s: float, patience_s: float
) -> None:
    notice, now_s = NodeNotice("node", given_s, given_s + within_s), given_s + passed_s
    step = decide_relocation(resident, notice, patience_s, now_s)
    latest_s = latest_drain_start_s(resident.num_open, notice)
    assert latest_s is not None
    assert given_s + within_s / 2 - 1e-6 <= latest_s <= given_s + within_s
    if resident.successor_ready:
        assert step.action is RelocationAction.DRAIN
    elif not resident.others_serve:
        assert step == RelocationStep(RelocationAction.WAIT)  # no other worker serves
    else:
        assert (step.action is RelocationAction.DRAIN) == (now_s >= latest_s)
        assert step.action is RelocationAction.DRAIN or step.until_s == latest_s
    busier = replace(resident, num_open=resident.num_open + 50)
    later = latest_drain_start_s(busier.num_open, notice)
    assert later is not None
    assert later <= latest_s  # more requests need an earlier drain


@given(resident=residents_, passed_s=seconds_, patience_s=seconds_)
def test_without_a_deadline_the_drain_waits_for_the_successor_up_to_the_start_timeout(
    resident: LeavingWorker, passed_s: float, patience_s: float
) -> None:
    step = decide_relocation(resident, NodeNotice("node", 0.0), patience_s, passed_s)
    waits = not resident.successor_ready and (not resident.others_serve or passed_s < patience_s)
    assert (step.action is RelocationAction.WAIT) == waits


class FakeNodes:
    own_node = "c"

    def __init__(self) -> None:
        self.moves = 0
        self.problem = ""
        self.note: Callable[[Sequence[NodeNotice]], None] = lambda notices: None
        self.dead: set[str] = set()

    async def watch(self, note: Callable[[Sequence[NodeNotice]], None]) -> None:
        self.note = note
        await asyncio.get_running_loop().create_future()

    async def find_dead(self, nodes: Collection[str]) -> Collection[str]:
        return self.dead.intersection(nodes)

    async def move_controller(self) -> str:
        self.moves += 1
        return self.problem

    async def leave(self, name: str, within_s: float | None) -> NodeNotice:
        now_s = time.monotonic()
        return NodeNotice(name, now_s, None if within_s is None else now_s + within_s, "an operator drains it")


def going(node: str, within_s: float | None = None) -> list[NodeNotice]:
    now_s = time.monotonic()
    return [NodeNotice(node, now_s, None if within_s is None else now_s + within_s, "spot")]


async def world_of_two_nodes() -> tuple[World, FakeNodes]:
    nodes = FakeNodes()
    world = World(nodes=nodes)
    world.node_of = {"prefill-0": "a", "decode-0": "a", "decode-1": "b"}
    await world.ready()
    await world.until(lambda status: all(each.state == "ready" for each in status.workers))
    return world, nodes


@given(given_s=seconds_, within_s=seconds_)
def test_the_controller_leaves_its_node_in_the_second_half_of_the_notice(given_s: float, within_s: float) -> None:
    latest_s = controller_move_s(NodeNotice("node", given_s, given_s + within_s))
    assert latest_s is not None
    assert given_s + within_s / 2 - 1e-6 <= latest_s <= given_s + within_s
    assert latest_s >= given_s + within_s - 20.0 - 1e-6
    assert controller_move_s(NodeNotice("node", given_s)) is None


async def test_the_controller_moves_once_its_nodes_workers_have_moved() -> None:
    world, nodes = await world_of_two_nodes()
    nodes.own_node = "b"
    world.node_of["decode-2"] = "a"
    world.may_start.clear()
    nodes.note(going("b"))
    await until(lambda: ("decode-2", 1) in world.processes)
    assert (nodes.moves, world.controller.relocation.is_moving) == (0, True)
    nodes.problem = "no other node can hold it"
    world.may_start.set()
    await become_idle(world, "decode-1")
    await until(lambda: nodes.moves == 1)
    await until(lambda: not world.controller.relocation.is_moving)
    events = [(event.what, event.reason) for event in world.controller.events.after(0) if event.subject == "controller"]
    assert [what for what, _ in events] == ["leaving", "stays"]
    assert events[1][1] == "no other node can hold it"


async def test_the_controller_leaves_a_node_that_ends_soon_although_a_worker_remains() -> None:
    world, nodes = await world_of_two_nodes()
    nodes.own_node = "b"
    world.may_start.clear()  # no successor ever starts
    nodes.note(going("b", within_s=2.0))
    await until(lambda: nodes.moves == 1)


async def become_idle(world: World, name: str) -> None:
    process = world.processes[name, 1]
    while not process.stopped:
        await until(lambda: world.controller.reports.is_awaited or process.stopped)
        process.report(worker_pb2.Load(num_open=0, num_routers=0))


async def test_a_successor_is_ready_before_a_worker_on_a_leaving_node_is_drained() -> None:
    world, nodes = await world_of_two_nodes()
    world.may_start.clear()
    nodes.note(going("b", within_s=600.0))
    nodes.note(going("b", within_s=700.0))  # a second notice changes nothing
    await until(lambda: ("decode-2", 1) in world.processes)
    status = world.controller.status()
    assert worker(status, "decode-1").state == "ready"  # it serves
    assert worker(status, "decode-2").detail == "beside decode-1, whose node goes"
    # A controller that restarts now continues the drain and keeps the pool's size.
    record = world.records[-1]
    assert (record.replicas["decode"], dict(record.leaving)) == (2, {"decode-1": False})
    world.node_of["decode-2"] = "a"
    world.may_start.set()
    await world.until(lambda status: worker(status, "decode-1").state == "draining")
    await become_idle(world, "decode-1")
    status = await world.until(lambda status: len(status.workers) == 4)
    assert {each.member.worker_id for each in status.workers} == {"prefill-0", "decode-0", "decode-2", "router-0"}
    assert world.controller.pool_service.replicas("decode") == 2
    assert ("decode-1", 2) not in world.processes
    assert dict(world.records[-1].leaving) == {}
    notices = [event for event in world.controller.events.after(0) if event.what == "leaving"]
    assert [event.subject for event in notices] == ["node b"]
    await world.controller.stop()


async def test_a_worker_whose_successor_cannot_be_placed_is_drained_before_the_deadline() -> None:
    world, _ = await world_of_two_nodes()
    world.unplaced["decode-2"] = "no room"
    (relocation,) = await world.controller.relocation.drain_node("b", within_s=1.0)
    assert isinstance(relocation, Relocation)
    idle = asyncio.create_task(become_idle(world, "decode-1"))
    stages = [progress.stage.value async for progress in relocation.follow()]
    await idle
    assert list(dict.fromkeys(stages)) == ["waiting", "draining", "stopping", "ended"]
    assert worker(world.controller.status(), "decode-2").state == "unplaced"
    assert world.controller.pool_service.replicas("decode") == 2
    await world.controller.stop()


async def test_a_worker_lost_before_its_drain_is_not_replaced_twice() -> None:
    world, nodes = await world_of_two_nodes()
    world.may_start.clear()
    nodes.note(going("b"))
    await until(lambda: ("decode-2", 1) in world.processes)
    world.processes["decode-1", 1].lose("the node went")
    status = await world.until(lambda status: len(status.workers) == 4)
    assert "decode-1" not in {each.member.worker_id for each in status.workers}
    world.may_start.set()
    await world.until(lambda status: worker(status, "decode-2").state == "ready")
    assert world.controller.pool_service.replicas("decode") == 2
    assert ("decode-1", 2) not in world.processes
    await world.controller.stop()


async def test_no_sequence_migrates_to_a_worker_on_a_leaving_node() -> None:
    world, nodes = await world_of_two_nodes()
    world.may_start.clear()
    members = world.controller.reports.members
    assert [each.worker_id for each in members(Role.DECODE)] == ["decode-0", "decode-1"]
    nodes.note(going("b"))
    assert [each.worker_id for each in members(Role.DECODE)] == ["decode-0"]
    watch = await anext(world.controller.membership.watch())
    assert "decode-1" in {each.worker_id for each in watch.members}  # the worker still serves
    nodes.note([*going("b"), *going("a")])
    assert [each.worker_id for each in members(Role.DECODE)] == [
        "decode-0",
        "decode-1",
    ]  # both nodes leave, so both workers become targets
    await world.controller.stop()


async def test_a_deployment_on_one_machine_refuses_to_drain_a_node() -> None:
    world = World()
    await world.ready()
    with pytest.raises(InvalidInput, match="has one machine"):
        await world.controller.relocation.drain_node("b")
    await world.controller.stop()
