"""Tests how a controller recovers the processes of its predecessor. The processes are fake. No Ray."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

from cluster.controller.composition import make_controller
from cluster.controller.record import FIRST_RECORD, ControllerRecord
from cluster.controller.supervised_process import FoundProcess, Started
from cluster.lifecycle.upgrade.gate_policy import UpgradeGate
from cluster.lifecycle.upgrade.rolling_upgrade import UpgradePlan, UpgradeStage
from cluster.lifecycle.upgrade.served_models import upgrade_from_record
from cluster.pools.pool import Incarnation
from cluster.pools.resources import NodeResources, ResourceShare, why_unplaced
from cluster.ray.recovery import newest, parse_name
from penstock.types import NEW_COHORT, OLD_COHORT, Epoch, Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2
from tests.cluster.controller.test_controller import CONFIG, World, worker

RECORD = replace(
    FIRST_RECORD,
    generation=2,
    was_ready=True,
    replicas={"prefill": 1, "decode": 2, "router": 1},
    last_numbers={"prefill-0": 1, "decode-0": 4, "decode-1": 1, "router-0": 1},
    num_restarts={"decode-0": 3},
)


class Successor(World):
    """Runs a controller that recovers the given processes of its predecessor; all are ready but `starting`."""

    def __init__(self, *running: tuple[str, int], record: ControllerRecord = RECORD, starting: str = "") -> None:
        super().__init__()
        self.num_started = 100
        self.records: list[ControllerRecord] = []
        self.controller = make_controller(CONFIG, self.spawn, self.canary, record=record, save=self.records.append)
        found = []
        for number, (name, life) in enumerate(running):
            incarnation = Incarnation(WorkerId(name), life)
            process = self.spawn(incarnation, CONFIG)
            started = Started(Epoch(number + 1), f"{name}:1", 4000, "router:2") if name != starting else None
            found.append(FoundProcess(incarnation, process, started))
        self.controller.recover(record, found)

    @property
    def all_processes(self) -> set[tuple[str, int]]:
        return set(self.processes)


ALL = (("prefill-0", 1), ("decode-0", 4), ("decode-1", 1), ("router-0", 1))


async def test_running_processes_are_recovered_before_the_first_membership() -> None:
    world = Successor(*ALL)
    first = await anext(world.controller.membership.watch())
    assert [(each.worker_id, each.epoch) for each in first.members] == [
        ("prefill-0", 1),
        ("decode-0", 2),
        ("decode-1", 3),
    ]
    assert world.controller.status().ready  # the router answered its canary under the first controller
    world.controller.start()
    status = await world.until(lambda status: worker(status, "decode-1").load.num_running == 3)
    assert world.all_processes == set(ALL)  # no other process was started
    assert worker(status, "decode-0").num_restarts == 3
    assert list(status.endpoints) == ["grpc://router-0:1", "http://router:2"]
    await world.controller.stop()
    assert sorted(world.stop_order) == sorted(name for name, _ in ALL)


async def test_versions_rise_from_controller_to_controller() -> None:
    first = World()
    await first.ready()
    before = await anext(first.controller.membership.watch())
    version = (await first.controller.wait(-1, 0)).version
    after = Successor(*ALL)
    assert (await anext(after.controller.membership.watch())).version > before.version
    assert (await after.controller.wait(-1, 0)).version > version
    await first.controller.stop()
    await after.controller.stop()


async def test_a_worker_that_died_in_between_is_replaced_under_a_new_number() -> None:
    world = Successor(*(each for each in ALL if each[0] != "decode-0"))
    world.controller.start()
    await world.until(lambda status: [each.state for each in status.workers].count("ready") == 4)
    assert world.all_processes == {*ALL, ("decode-0", 5)} - {("decode-0", 4)}
    assert world.records[-1].last_numbers["decode-0"] == 5
    await world.controller.stop()


async def test_a_starting_worker_continues_to_start() -> None:
    world = Successor(*ALL, starting="decode-1")
    assert worker(world.controller.status(), "decode-1").state == "starting"
    world.controller.start()
    await world.until(lambda status: worker(status, "decode-1").state == "ready")
    assert world.all_processes == set(ALL)
    await world.controller.stop()


async def test_a_pool_that_was_scaled_down_stays_small() -> None:
    world = Successor(*ALL, record=replace(RECORD, replicas={"prefill": 1, "decode": 1, "router": 1}))
    assert world.controller.pool_service.replicas("decode") == 1
    world.controller.start()
    status = await world.until(lambda status: bool(world.stop_order) and len(status.workers) == 3)
    assert _names(status) == {"prefill-0", "decode-0", "router-0"}
    assert world.stop_order == ["decode-1"]
    membership = await anext(world.controller.membership.watch())
    assert [each.worker_id for each in membership.members] == ["prefill-0", "decode-0"]
    assert world.all_processes == set(ALL)  # no other process was started
    assert world.records[-1].replicas["decode"] == 1
    await world.controller.stop()


async def test_a_silent_worker_gets_no_new_requests_until_it_answers() -> None:
    world = World()
    await world.ready()
    watch = world.controller.membership.watch()
    await anext(watch)
    silent = world.processes["decode-1", 1]
    silent.doubt("no sign of life for 2.3 s")
    assert [each.worker_id for each in (await anext(watch)).members] == ["prefill-0", "decode-0"]
    status = worker(world.controller.status(), "decode-1")
    assert (status.state, status.detail) == ("silent", "no sign of life for 2.3 s")
    silent.doubt("")
    assert len((await anext(watch)).members) == 3
    assert worker(world.controller.status(), "decode-1").num_restarts == 0
    await world.controller.stop()


async def test_an_unplaceable_worker_is_reported_while_the_others_serve() -> None:
    world = World()
    world.unplaced["prefill-0"] = "needs GPU 1, and no node has more than 0"
    status = await world.ready()
    assert worker(status, "prefill-0").state == "unplaced"
    assert worker(status, "prefill-0").detail == "needs GPU 1, and no node has more than 0"
    assert worker(status, "decode-0").state == "ready"
    await world.controller.stop()
    assert world.processes["prefill-0", 1].killed


def test_a_record_round_trips_and_ignores_unknown_fields() -> None:
    assert ControllerRecord.from_json(RECORD.to_json()) == RECORD
    assert ControllerRecord.from_json(b'{"generation": 7, "unheard_of": 1}') == replace(FIRST_RECORD, generation=7)


def test_actor_names_identify_incarnations() -> None:
    assert parse_name("decode-12.3") == Incarnation(WorkerId("decode-12"), 3)
    assert parse_name("router-0.1") == Incarnation(WorkerId("router-0"), 1)
    assert [parse_name(name) for name in ("controller", "decode-1", "xdecode-1.2", "decode-1.2.3")] == [None] * 4


async def test_a_flipped_worker_is_identified_by_its_report_not_its_name() -> None:
    world = World()

    def found(pool: str, place: int, number: int) -> FoundProcess:
        incarnation = Incarnation(WorkerId(f"{pool}-{place}"), number)
        return FoundProcess(incarnation, world.spawn(incarnation, CONFIG), None)

    names = [Incarnation(WorkerId("decode-1"), 1), Incarnation(WorkerId("decode-1"), 2)]
    flipped, successor = found("prefill", 1, 1), found("decode", 1, 2)
    assert newest({names[0]: flipped, names[1]: successor}) == {names[0]: flipped, names[1]: successor}
    old = found("decode", 1, 1)
    assert newest({names[1]: successor, names[0]: old}) == {names[1]: successor}


def test_why_unplaced_states_the_obstacle_and_the_fix() -> None:
    small = NodeResources({"CPU": 4.0}, {"zone": "a"})
    large = NodeResources({"CPU": 2.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, {"zone": "b"})

    def explain(num_cpus: float, num_ranks: int = 1, **share: Any) -> str:
        return why_unplaced(ResourceShare(num_cpus, 1, **share), [small, large], num_ranks)

    assert explain(8.0) == "needs CPU 8, and no node has more than 4; add such a node, or ask for less"
    assert "needs accelerator_type:A100" in explain(1.0, accelerator_type="A100")
    assert explain(4.0, num_gpus=1.0).startswith("no single node has all of CPU 4, GPU 1")
    assert explain(4.0, node_labels={"zone": "b"}).startswith("needs CPU 4, and no node has more than 2")
    assert explain(1.0, node_labels={"zone": "c"}).startswith("no node has the labels zone=c")
    assert explain(1.0, node_labels={"zone": "!in(a, b)"}).startswith("no node has the labels")
    assert explain(1.0, node_labels={"zone": "in(b, c)"}).startswith("waits for CPU 1")
    assert why_unplaced(ResourceShare(1.0, 1), []) == "there is no node"
    # All ranks of a worker must be on one node.
    assert explain(1.0, num_ranks=3, num_gpus=1.0).startswith("no single node has all of CPU 3, GPU 3")
    assert explain(0.5, num_ranks=4, num_gpus=1.0).startswith("waits for CPU 2, GPU 4")


async def test_a_drain_in_flight_continues() -> None:
    record = replace(RECORD, replicas={"prefill": 1, "decode": 1, "router": 1}, leaving={"decode-1": False})
    world = Successor(*ALL, record=record)
    world.controller.start()
    status = await world.until(lambda status: worker(status, "decode-1").state == "draining")
    assert len(status.workers) == 4
    world.processes["decode-1", 1].lose()
    await world.until(lambda status: len(status.workers) == 3)
    await asyncio.wait_for(world.controller.stop(), 60)


SHARES = {OLD_COHORT: 0.75, NEW_COHORT: 0.25}


def upgrade_record(
    stage: str, *, decided: bool = False, failure: str = "", window_s: float = 600.0, without_evidence: bool = True
) -> ControllerRecord:
    """Returns the record of an upgrade in which one of two decode workers is new."""
    gate = UpgradeGate(window_s=window_s, without_evidence=without_evidence)
    upgrade = {
        "plan": asdict(UpgradePlan("models/the-next", gate, share=0.25)),
        "stage": stage,
        "decided": decided,
        "failure": failure,
        "new": ["decode-1"],
        "replicas": {"prefill": 0, "decode": 1},
        "shares": SHARES,
    }
    replicas = {"prefill": 0, "decode": 2, "router": 1}
    return ControllerRecord.from_json(replace(RECORD, replicas=replicas, upgrade=upgrade).to_json())


UPGRADED = tuple(each for each in ALL if each[0] != "prefill-0")


async def become_idle(world: World, name: str, life: int) -> None:
    process = world.processes[name, life]
    async with asyncio.timeout(60):
        while not process.stopped:
            if world.controller.reports.is_awaited:
                process.report(worker_pb2.Load(num_open=0, num_routers=0))
            await asyncio.sleep(0.001)


def cohorts(membership: admin_pb2.Membership) -> dict[str, str]:
    return {each.worker_id: each.cohort for each in membership.members}


async def test_routers_keep_their_shares_when_an_upgrade_outlives_its_controller() -> None:
    world = Successor(*UPGRADED, record=upgrade_record("proving"))
    first = await anext(world.controller.membership.watch())
    assert dict(first.shares) == SHARES
    assert cohorts(first) == {"decode-0": OLD_COHORT, "decode-1": NEW_COHORT}
    world.controller.start()
    upgrade = world.controller.upgrading.abort()  # the upgrade is in flight and can be aborted
    idle = asyncio.create_task(become_idle(world, "decode-1", 1))
    stages = [progress.stage async for progress in upgrade.follow()]
    await idle
    assert stages[-1] is UpgradeStage.ROLLED_BACK
    assert {name for name, _ in world.all_processes} == {name for name, _ in UPGRADED}
    written = [upgrade_from_record(ControllerRecord.from_json(each.to_json()).upgrade) for each in world.records]
    assert written[0] is not None
    assert written[0].plan == upgrade.plan
    assert (written[0].new, written[0].replicas[Role.DECODE]) == ({"decode-1"}, 1)
    assert {each.stage for each in written if each} <= {UpgradeStage.PROVING, UpgradeStage.ROLLING_BACK}
    assert world.records[-1].upgrade == {}
    assert world.records[-1].model == CONFIG.model
    await world.controller.stop()


async def test_an_upgrade_continues_at_its_stage() -> None:
    """The gate restarts; a decision that was already made is carried out."""
    world = Successor(*UPGRADED, record=upgrade_record("proving", window_s=0.1))
    world.controller.start()
    idle = asyncio.create_task(become_idle(world, "decode-0", 4))
    status = await world.until(
        lambda status: {each.member.worker_id for each in status.workers} == {"decode-1", "router-0"}
    )
    await idle
    assert worker(status, "decode-1").state == "ready"
    await asyncio.wait_for(_until_recorded(world, "models/the-next"), 60)
    assert world.records[-1].replicas["decode"] == 1
    membership = await anext(world.controller.membership.watch())
    assert (dict(membership.shares), cohorts(membership)) == ({}, {"decode-1": OLD_COHORT})
    upgrade = world.controller.upgrading.last
    assert upgrade is not None
    assert upgrade.progress.stage is UpgradeStage.DONE
    assert upgrade.progress.detail.startswith("without evidence: 0 requests at new workers")  # kept until the end
    await world.controller.stop()


async def test_an_upgrade_without_traffic_is_rolled_back_unless_allowed() -> None:
    record = upgrade_record("proving", window_s=0.05, without_evidence=False)
    world = Successor(*UPGRADED, record=record)
    world.controller.start()
    upgrade = world.controller.upgrading.current
    assert upgrade is not None
    idle = asyncio.create_task(become_idle(world, "decode-1", 1))
    reports = [progress async for progress in upgrade.follow()]
    await idle
    assert reports[-1].stage is UpgradeStage.ROLLED_BACK
    assert reports[-1].detail.startswith("no evidence: new workers served no request (0 requests at new workers")
    assert "--without-evidence" in reports[-1].detail
    events = [(event.subject, event.what) for event in world.controller.events.after(0)]
    assert ("decode-1", "rolled back") in events
    assert "lost" not in {what for _, what in events}
    await world.controller.stop()


def _names(status: admin_pb2.StatusResponse) -> set[str]:
    return {each.member.worker_id for each in status.workers}


async def _until_recorded(world: Successor, model: str) -> None:
    while not world.records or world.records[-1].model != model:
        await world.controller.wait((await world.controller.wait(-1, 0.0)).version, 0.1)


async def test_a_rollback_continues_and_starts_the_missing_workers() -> None:
    record = upgrade_record("rolling back", failure="too many errors")
    world = Successor(("decode-1", 1), ("router-0", 1), record=record)
    world.controller.start()
    await world.until(lambda status: any(each.member.worker_id == "decode-0" for each in status.workers))
    await world.until(lambda status: worker(status, "decode-0").state == "ready")
    await become_idle(world, "decode-1", 1)
    await world.until(lambda status: _names(status) == {"decode-0", "router-0"})
    await asyncio.wait_for(_until_recorded(world, CONFIG.model), 60)
    await world.controller.stop()
