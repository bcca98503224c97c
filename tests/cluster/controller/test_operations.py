"""Tests the event log, which workers leave a smaller pool, scaling over fake processes, and the commands. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.commands.inspecting.explain import format_record
from cluster.cli.main import main
from cluster.controller.admin_service import start_admin_server
from cluster.controller.event_log import EventLog
from cluster.lifecycle.capacity_check import Machines
from cluster.pools.pool import Incarnation, Pool, Slot, WorkerState
from cluster.pools.pool_policy import choose_workers_to_remove
from penstock.errors import InvalidInput
from penstock.types import Epoch, WorkerId
from penstock.v1 import admin_pb2, worker_pb2
from tests.cluster.controller.test_controller import World, worker
from tests.cluster.pools.test_pool import make_ready, started

# The event log.


def logged(log: EventLog, after: int = 0) -> list[tuple[str, str, str]]:
    return [(event.subject, event.what, event.reason) for event in log.after(after)]


async def test_each_transition_is_logged_once_with_its_reason() -> None:
    now_s = 100.0
    pool, log = Pool("decode", 1), EventLog(lambda: now_s)
    (first,) = started(pool)
    log.observe(pool.slots)
    log.observe(pool.slots)
    make_ready(pool, first)
    log.observe(pool.slots)
    now_s = 200.0
    pool.on_lost(first, "its process died")
    log.observe(pool.slots)
    pool.on_removed(first, 0.0)
    (second,) = started(pool)
    log.observe(pool.slots)
    pool.set_replicas(0)
    pool.reconcile(0.0)
    log.observe(pool.slots)
    assert logged(log) == [
        ("decode-0", "starting", ""),
        ("decode-0", "ready", ""),
        ("decode-0", "lost", "its process died"),
        ("decode-0", "starting", "in place of the one that was lost; restart 1"),
        ("decode-0", "scaled down", ""),
    ]
    events = log.after(0)
    assert [event.number for event in events] == [1, 2, 3, 4, 5]
    assert [event.unix_time_s for event in events] == [100.0, 100.0, 200.0, 200.0, 200.0]
    assert events[1].epoch == events[2].epoch > 0 == events[0].epoch
    assert second.number == 2


async def test_a_follower_gets_kept_events_then_new_ones_until_the_log_ends() -> None:
    log = EventLog(lambda: 0.0, max_events=3)
    for number in range(5):
        log.note("decode", "scaled", str(number))
    assert [reason for _, _, reason in logged(log)] == ["2", "3", "4"]  # bounded: the oldest events are dropped
    follower = log.follow(4)
    assert (await anext(follower)).reason == "4"
    waiting = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    log.note("decode", "scaled", "5")
    assert (await asyncio.wait_for(waiting, 60)).number == 6
    log.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(follower), 60)


# Which workers leave a smaller pool.


def slot(place: int, state: WorkerState) -> Slot:
    return Slot(Incarnation(WorkerId(f"decode-{place}"), 1), state)


def load(used_pages: int, num_open: int = 0) -> worker_pb2.Load:
    return worker_pb2.Load(free_pages=100 - used_pages, total_pages=100, num_open=num_open)


def test_idle_workers_leave_first_then_those_with_the_least_to_migrate() -> None:
    slots = [
        slot(0, WorkerState.READY),
        slot(1, WorkerState.READY),
        slot(2, WorkerState.STARTING),
        slot(3, WorkerState.LOST),
        slot(4, WorkerState.READY),
    ]
    loads = {WorkerId("decode-0"): load(5), WorkerId("decode-1"): load(50), WorkerId("decode-4"): load(5)}
    order = [each.incarnation.place for each in choose_workers_to_remove(slots, loads, 5)]
    assert order == [3, 2, 4, 0, 1]
    slots[3].is_leaving = True
    assert [each.incarnation.place for each in choose_workers_to_remove(slots, loads, 2)] == [2, 4]
    assert choose_workers_to_remove(slots, loads, -1) == []


@given(
    states=st.lists(st.sampled_from([WorkerState.STARTING, WorkerState.READY]), max_size=6), wanted=st.integers(0, 6)
)
def test_a_smaller_pool_stops_workers_that_are_not_ready_first(states: list[WorkerState], wanted: int) -> None:
    pool = Pool("decode", len(states))
    for incarnation, state in zip(started(pool), states, strict=True):
        if state is WorkerState.READY:
            make_ready(pool, incarnation)
    num_ready = states.count(WorkerState.READY)
    pool.set_replicas(wanted)
    pool.reconcile(0.0)
    assert sum(1 for _ in pool.ready()) == min(num_ready, wanted)
    assert len(pool.slots) == wanted


# The controller.


async def test_a_pool_grows_at_once_and_shrinks_by_draining_the_idlest() -> None:
    world = World()
    await world.ready()
    world.processes["decode-0", 1].report(worker_pb2.Load(num_open=0, free_pages=100, total_pages=100))
    world.processes["decode-1", 1].report(worker_pb2.Load(num_open=3, free_pages=10, total_pages=100))
    assert world.controller.pool_service.scale("decode", 3) == []
    await world.until(lambda status: len(status.workers) == 5 and worker(status, "decode-2").load.num_running > 0)
    assert worker(world.controller.status(), "decode-2").state == "ready"
    world.processes["decode-2", 1].report(worker_pb2.Load(num_open=1, free_pages=10, total_pages=100))
    numbers = [event.number for event in world.controller.events.after(0)]
    assert world.controller.pool_service.scale("decode", 2) == ["decode-0"]
    assert world.controller.pool_service.replicas("decode") == 2
    status = world.controller.status()
    assert worker(status, "decode-0").state == "draining"
    assert {worker(status, name).state for name in ("decode-1", "decode-2")} == {"ready"}
    assert logged(world.controller.events, numbers[-1]) == [
        ("decode-0", "draining", "to be scaled down"),
        ("decode", "scaled", "from 3 to 2 workers by an operator"),
    ]
    await world.controller.stop()


async def test_an_impossible_scale_is_refused_with_the_fix() -> None:
    world = World()
    await world.ready()
    with pytest.raises(InvalidInput, match="pool: is 'router'; give one of prefill, decode"):
        world.controller.pool_service.scale("router", 2)
    with pytest.raises(InvalidInput, match="is 0 for the decode pool; without a decode worker nothing is served"):
        world.controller.pool_service.scale("decode", 0)
    # Decode workers then compute prompts locally.
    assert world.controller.pool_service.scale("prefill", 0) == ["prefill-0"]
    await world.controller.stop()


# The commands.


@contextlib.asynccontextmanager
async def served(machines: Machines | None = None) -> AsyncIterator[tuple[World, str]]:
    world = World(machines=machines)
    world.node_of = {f"{pool}-{place}": "n" for pool in ("prefill", "decode") for place in range(9)}
    await world.ready()
    server, address = await start_admin_server(world.controller, "127.0.0.1", 0)
    try:
        yield world, address
    finally:
        await world.controller.stop()
        await server.stop(0)


async def command(*argv: str) -> int:
    return await asyncio.wait_for(asyncio.to_thread(main, list(argv)), 60)


async def test_scale_prints_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as (world, address):
        assert await command("scale", "decode", "3", "--admin", address) == 0
        assert capsys.readouterr().out.splitlines()[0] == "decode: 2 -> 3 workers"
        await world.until(lambda status: len(status.workers) == 5 and status.workers[3].state == "ready")
        assert await command("scale", "decode", "1", "--json", "--admin", address) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["replicas_before"], answer["replicas"], len(answer["draining"])) == (3, 1, 2)
        assert await command("scale", "decode", "0", "--admin", address) == 2
        assert "without a decode worker nothing is served" in capsys.readouterr().err
        assert await command("scale", "decode", "-1", "--admin", address) == 2
        assert "replicas: is -1" in capsys.readouterr().err


async def test_events_are_printed_with_time_subject_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as (world, address):
        world.processes["decode-0", 1].lose("its process died")
        await world.until(lambda status: worker(status, "decode-0").num_restarts == 1)
        assert await command("events", "--admin", address) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.endswith("  decode-0 lost: its process died") for line in lines)
        following = asyncio.create_task(command("events", "-f", "--json", "--admin", address))
        await world.controller.stop()
        assert await following == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [int(event["number"]) for event in events] == list(range(1, len(events) + 1))
        assert events[-1]["what"] == "stopped"
        assert Epoch(int(events[-1]["epoch"])) > 0


async def test_explain_prints_decisions_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as (_, address):
        assert await command("explain", "--admin", address) == 0
        assert capsys.readouterr().out.splitlines()[0].startswith("the autoscaler is ")
        assert await command("explain", "router", "--admin", address) == 2
        assert "pool: is 'router'; give prefill or decode" in capsys.readouterr().err
    record = admin_pb2.ScaleRecord(pool="decode", current=2, wanted=4, decided=3, verdict="up", reason="pages run out")
    record.figures["pages"] = 0.91234
    record.failed = "no room"
    head, figures, failed = format_record(record).splitlines()
    assert head.endswith("  decode up, 2 -> 3 workers, 4 wanted: pages run out")
    assert (figures, failed) == ("  pages 0.9123", "  the change failed: no room")
