"""A controller dies, and its successor takes over what runs. Processes are played by the test; no Ray."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

from cluster.controller import Controller
from cluster.feasibility import Node, why_unplaced
from cluster.pool import Incarnation
from cluster.promotion import Gate
from cluster.record import FIRST_RECORD, Record
from cluster.recovery import newest, parse_name
from cluster.shares import Share
from cluster.supervised import Found, Started
from cluster.upgrade import Plan, UpgradeStage
from cluster.upgrade_record import upgrade_from_record
from penstock.types import NEW_COHORT, OLD_COHORT, Epoch, Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2
from tests.test_cluster_controller import CONFIG, World, worker

RECORD = replace(
    FIRST_RECORD,
    generation=2,
    was_ready=True,
    replicas={"prefill": 1, "decode": 2, "router": 1},
    last_numbers={"prefill-0": 1, "decode-0": 4, "decode-1": 1, "router-0": 1},
    num_restarts={"decode-0": 3},
)


class Successor(World):
    """The first controller is gone; of its processes those named here still run, ready unless said otherwise."""

    def __init__(self, *running: tuple[str, int], record: Record = RECORD, starting: str = "") -> None:
        super().__init__()
        self.num_started = 100
        self.records: list[Record] = []
        self.controller = Controller(CONFIG, self.spawn, self.canary, record=record, save=self.records.append)
        found = []
        for number, (name, life) in enumerate(running):
            incarnation = Incarnation(WorkerId(name), life)
            process = self.spawn(incarnation)
            started = Started(Epoch(number + 1), f"{name}:1", 4000, "router:2") if name != starting else None
            found.append(Found(incarnation, process, started))
        self.controller.adopt(found)

    @property
    def everything(self) -> set[tuple[str, int]]:
        return set(self.processes)


ALL = (("prefill-0", 1), ("decode-0", 4), ("decode-1", 1), ("router-0", 1))


async def test_what_runs_is_taken_over_before_anybody_hears_of_the_successor() -> None:
    world = Successor(*ALL)
    first = await anext(world.controller.watch_membership())
    assert [(one.worker_id, one.epoch) for one in first.members] == [("prefill-0", 1), ("decode-0", 2), ("decode-1", 3)]
    assert world.controller.status().ready  # the router has proven itself under the first one
    world.controller.start()
    status = await world.until(lambda status: worker(status, "decode-1").load.num_running == 3)
    assert world.everything == set(ALL)  # nothing was started beside them
    assert worker(status, "decode-0").num_restarts == 3
    assert list(status.endpoints) == ["grpc://router-0:1", "http://router:2"]
    await world.controller.stop()
    assert sorted(world.stop_order) == sorted(name for name, _ in ALL)


async def test_versions_rise_from_controller_to_controller() -> None:
    first = World()
    await first.ready()
    before = await anext(first.controller.watch_membership())
    version = (await first.controller.wait(-1, 0)).version
    after = Successor(*ALL)
    assert (await anext(after.controller.watch_membership())).version > before.version
    assert (await after.controller.wait(-1, 0)).version > version
    await first.controller.stop()
    await after.controller.stop()


async def test_what_died_meanwhile_is_replaced_under_a_fresh_number() -> None:
    world = Successor(*(one for one in ALL if one[0] != "decode-0"))
    world.controller.start()
    await world.until(lambda status: [one.state for one in status.workers].count("ready") == 4)
    assert world.everything == {*ALL, ("decode-0", 5)} - {("decode-0", 4)}
    assert world.records[-1].last_numbers["decode-0"] == 5
    await world.controller.stop()


async def test_what_was_starting_goes_on_starting() -> None:
    world = Successor(*ALL, starting="decode-1")
    assert worker(world.controller.status(), "decode-1").state == "starting"
    world.controller.start()
    await world.until(lambda status: worker(status, "decode-1").state == "ready")
    assert world.everything == set(ALL)
    await world.controller.stop()


async def test_a_pool_that_was_made_smaller_stays_so() -> None:
    world = Successor(*ALL, record=replace(RECORD, replicas={"prefill": 1, "decode": 1, "router": 1}))
    world.controller.start()
    await world.until(lambda status: len(status.workers) == 3)
    await world.until(lambda status: world.stop_order == ["decode-1"])
    await world.controller.stop()


async def test_a_silent_worker_takes_no_new_work_until_it_speaks() -> None:
    world = World()
    await world.ready()
    watch = world.controller.watch_membership()
    await anext(watch)
    silent = world.processes["decode-1", 1]
    silent.doubt("no sign of life for 2.3 s")
    assert [one.worker_id for one in (await anext(watch)).members] == ["prefill-0", "decode-0"]
    status = worker(world.controller.status(), "decode-1")
    assert (status.state, status.detail) == ("silent", "no sign of life for 2.3 s")
    silent.doubt("")
    assert len((await anext(watch)).members) == 3
    assert worker(world.controller.status(), "decode-1").num_restarts == 0
    await world.controller.stop()


async def test_a_worker_that_no_node_can_hold_is_told_and_the_others_serve() -> None:
    world = World()
    world.unplaced["prefill-0"] = "needs GPU 1, and no node has more than 0"
    status = await world.ready()
    assert worker(status, "prefill-0").state == "unplaced"
    assert worker(status, "prefill-0").detail == "needs GPU 1, and no node has more than 0"
    assert worker(status, "decode-0").state == "ready"
    await world.controller.stop()
    assert world.processes["prefill-0", 1].killed


def test_a_record_survives_its_own_writing_and_what_it_does_not_know() -> None:
    assert Record.from_json(RECORD.to_json()) == RECORD
    assert Record.from_json(b'{"generation": 7, "unheard_of": 1}') == replace(FIRST_RECORD, generation=7)


def test_ours_are_told_by_their_names() -> None:
    assert parse_name("decode-12.3") == Incarnation(WorkerId("decode-12"), 3)
    assert parse_name("router-0.1") == Incarnation(WorkerId("router-0"), 1)
    assert [parse_name(name) for name in ("controller", "decode-1", "xdecode-1.2", "decode-1.2.3")] == [None] * 4


async def test_one_that_has_changed_its_role_is_known_by_what_it_says_and_not_by_its_name() -> None:
    world = World()

    def found(pool: str, place: int, number: int) -> Found:
        incarnation = Incarnation(WorkerId(f"{pool}-{place}"), number)
        return Found(incarnation, world.spawn(incarnation), None)

    names = [Incarnation(WorkerId("decode-1"), 1), Incarnation(WorkerId("decode-1"), 2)]
    flipped, successor = found("prefill", 1, 1), found("decode", 1, 2)
    assert newest({names[0]: flipped, names[1]: successor}) == {names[0]: flipped, names[1]: successor}
    old = found("decode", 1, 1)
    assert newest({names[1]: successor, names[0]: old}) == {names[1]: successor}


def test_why_a_worker_is_not_placed() -> None:
    small = Node({"CPU": 4.0}, {"zone": "a"})
    large = Node({"CPU": 2.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, {"zone": "b"})

    def say(share: Share) -> str:
        return why_unplaced(share, [small, large])

    assert say(Share(8.0, 1)) == "needs CPU 8, and no node has more than 4; add such a node, or ask for less"
    assert "needs accelerator_type:A100" in say(Share(1.0, 1, accelerator_type="A100"))
    assert say(Share(4.0, 1, num_gpus=1.0)).startswith("no single node has all of CPU 4, GPU 1")
    assert say(Share(4.0, 1, node_labels={"zone": "b"})).startswith("needs CPU 4, and no node has more than 2")
    assert say(Share(1.0, 1, node_labels={"zone": "c"})).startswith("no node has the labels zone=c")
    assert say(Share(1.0, 1, node_labels={"zone": "!in(a, b)"})).startswith("no node has the labels")
    assert say(Share(1.0, 1, node_labels={"zone": "in(b, c)"})).startswith("waits for CPU 1")
    assert why_unplaced(Share(1.0, 1), []) == "there is no node"
    ranks = why_unplaced(Share(1.0, 1, num_gpus=1.0), [small, large], num_ranks=3)  # all of them on one node
    assert ranks.startswith("no single node has all of CPU 3, GPU 3")
    assert why_unplaced(Share(0.5, 1, num_gpus=1.0), [small, large], num_ranks=4).startswith("waits for CPU 2, GPU 4")


async def test_a_drain_that_was_under_way_goes_on() -> None:
    record = replace(RECORD, replicas={"prefill": 1, "decode": 1, "router": 1}, leaving={"decode-1": False})
    world = Successor(*ALL, record=record)
    world.controller.start()
    status = await world.until(lambda status: worker(status, "decode-1").state == "draining")
    assert len(status.workers) == 4
    world.processes["decode-1", 1].lose()
    await world.until(lambda status: len(status.workers) == 3)
    await asyncio.wait_for(world.controller.stop(), 10)


SHARES = {OLD_COHORT: 0.75, NEW_COHORT: 0.25}


def upgrade_record(stage: str, *, decided: bool = False, failure: str = "", window_s: float = 600.0) -> Record:
    """Of two decode workers one is new."""
    upgrade = {
        "plan": asdict(Plan("models/the-next", Gate(window_s=window_s), share=0.25)),
        "stage": stage,
        "decided": decided,
        "failure": failure,
        "new": ["decode-1"],
        "replicas": {"prefill": 0, "decode": 1},
        "shares": SHARES,
    }
    replicas = {"prefill": 0, "decode": 2, "router": 1}
    return Record.from_json(replace(RECORD, replicas=replicas, upgrade=upgrade).to_json())


UPGRADED = tuple(one for one in ALL if one[0] != "prefill-0")


async def become_idle(world: World, name: str, life: int) -> None:
    process = world.processes[name, life]
    async with asyncio.timeout(20):
        while not process.stopped:
            if world.controller.reports.is_awaited:
                process.report(worker_pb2.Load(num_open=0))
            await asyncio.sleep(0.001)


def cohorts(membership: admin_pb2.Membership) -> dict[str, str]:
    return {one.worker_id: one.cohort for one in membership.members}


async def test_routers_keep_their_shares_while_an_upgrade_outlives_its_controller() -> None:
    world = Successor(*UPGRADED, record=upgrade_record("proving"))
    first = await anext(world.controller.watch_membership())
    assert dict(first.shares) == SHARES
    assert cohorts(first) == {"decode-0": OLD_COHORT, "decode-1": NEW_COHORT}
    world.controller.start()
    upgrade = world.controller.abort_upgrade()  # it is under way, and can be taken back
    idle = asyncio.create_task(become_idle(world, "decode-1", 1))
    stages = [progress.stage async for progress in upgrade.follow()]
    await idle
    assert stages[-1] is UpgradeStage.ROLLED_BACK
    assert {name for name, _ in world.everything} == {name for name, _ in UPGRADED}
    written = [upgrade_from_record(Record.from_json(one.to_json()).upgrade) for one in world.records]
    assert written[0] is not None
    assert written[0].plan == upgrade.plan
    assert (written[0].new, written[0].replicas[Role.DECODE]) == ({"decode-1"}, 1)
    assert {one.stage for one in written if one} <= {UpgradeStage.PROVING, UpgradeStage.ROLLING_BACK}
    assert world.records[-1].upgrade == {}
    assert world.records[-1].model == CONFIG.model
    await world.controller.stop()


async def test_an_upgrade_goes_on_where_it_stood() -> None:
    """The gate looks anew; what was decided is carried through."""
    world = Successor(*UPGRADED, record=upgrade_record("proving", window_s=0.1))
    world.controller.start()
    idle = asyncio.create_task(become_idle(world, "decode-0", 4))
    status = await world.until(
        lambda status: {one.member.worker_id for one in status.workers} == {"decode-1", "router-0"}
    )
    await idle
    assert worker(status, "decode-1").state == "ready"
    await asyncio.wait_for(_until_recorded(world, "models/the-next"), 10)
    assert world.records[-1].replicas["decode"] == 1
    membership = await anext(world.controller.watch_membership())
    assert (dict(membership.shares), cohorts(membership)) == ({}, {"decode-1": OLD_COHORT})
    await world.controller.stop()


def _names(status: admin_pb2.StatusResponse) -> set[str]:
    return {one.member.worker_id for one in status.workers}


async def _until_recorded(world: Successor, model: str) -> None:
    while not world.records or world.records[-1].model != model:
        await world.controller.wait((await world.controller.wait(-1, 0.0)).version, 0.1)


async def test_one_that_goes_back_goes_on_going_back_and_starts_what_it_lacks() -> None:
    record = upgrade_record("rolling back", failure="too many errors")
    world = Successor(("decode-1", 1), ("router-0", 1), record=record)
    world.controller.start()
    await world.until(lambda status: any(one.member.worker_id == "decode-0" for one in status.workers))
    await world.until(lambda status: worker(status, "decode-0").state == "ready")
    await become_idle(world, "decode-1", 1)
    await world.until(lambda status: _names(status) == {"decode-0", "router-0"})
    await asyncio.wait_for(_until_recorded(world, CONFIG.model), 10)
    await world.controller.stop()
