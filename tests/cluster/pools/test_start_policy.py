"""Tests which workers start next, and how many the machines can hold. Starts nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools.capacity_policy import Capacity, MemoryRoom, PoolPlan, WorkerNeed, count_fitting
from cluster.pools.pool import COMING, ROUTER, Incarnation, Pool, Slot, WorkerState
from cluster.pools.pool_policy import choose_workers_to_remove
from cluster.pools.resources import NodeResources, ResourceShare
from cluster.pools.start_policy import choose_starts, max_starts
from penstock.types import WorkerId
from tests.cluster.pools.test_pool import make_ready, started

# Turns.

STATES = st.sampled_from(list(WorkerState))
POOLS = st.sampled_from(["prefill", "decode", ROUTER])
FLAGS = st.booleans()


@st.composite
def deployments(draw: st.DrawFn) -> list[Slot]:
    slots = []
    for place, (pool, state, has_served, is_placed, is_loaded, is_leaving) in enumerate(
        draw(st.lists(st.tuples(POOLS, STATES, FLAGS, FLAGS, FLAGS, FLAGS), max_size=12))
    ):
        slot = Slot(Incarnation(WorkerId(f"{pool}-{place}"), 1), state, failures_in_a_row=draw(st.integers(0, 4)))
        slot.has_served, slot.is_placed, slot.is_loaded, slot.is_leaving = has_served, is_placed, is_loaded, is_leaving
        slots.append(slot)
    return slots


def is_newcomer(slot: Slot) -> bool:
    return not slot.has_served and slot.incarnation.pool_name != ROUTER


@given(deployments(), st.sampled_from([1.0, 2.0, 4.0, 16.0]))
def test_few_newcomers_start_at_once_and_never_before_a_lost_workers_successor(
    slots: list[Slot], num_cores: float
) -> None:
    chosen = choose_starts(slots, num_cores)
    by_name = {slot.incarnation: slot for slot in slots}
    begun = [by_name[each] for each in chosen.begin]
    assert all(slot.state is WorkerState.WAITING and not slot.is_leaving for slot in begun)
    # Successors and routers never wait.
    waiting = [slot for slot in slots if slot.state is WorkerState.WAITING and not slot.is_leaving]
    assert [slot for slot in waiting if not is_newcomer(slot) and slot not in begun] == []
    newcomers = [slot for slot in begun if is_newcomer(slot)]
    workers = [slot for slot in slots if slot.incarnation.pool_name != ROUTER]
    serving = any(slot.state in (WorkerState.READY, WorkerState.SILENT) for slot in workers)
    if newcomers:
        loading = [slot for slot in workers if slot.state is WorkerState.STARTING and not slot.is_loaded]
        begun_workers = [slot for slot in begun if slot.incarnation.pool_name != ROUTER]
        assert len(loading) + len(begun_workers) <= max_starts(num_cores, serving=serving)
        assert not any(slot.state is WorkerState.SILENT for slot in slots)
        assert not any(
            slot.has_served and not slot.is_leaving and slot.state is WorkerState.WAITING and not slot.is_placed
            for slot in workers
        )
    # Withdrawn workers have no place yet and have never served.
    for incarnation in chosen.withdraw:
        slot = by_name[incarnation]
        assert is_newcomer(slot)
        assert not slot.is_placed
        assert slot.state in (WorkerState.STARTING, WorkerState.UNPLACED)


@given(deployments())
def test_every_newcomer_gets_its_turn(slots: list[Slot]) -> None:
    """Whatever blocks newcomers ends by itself: a success, a loss, or a report that there is no place."""
    for slot in slots:
        if slot.state is not WorkerState.WAITING or slot.has_served:
            slot.state, slot.is_loaded = WorkerState.READY, True
    left = [slot for slot in slots if slot.state is WorkerState.WAITING and not slot.is_leaving]
    while left:
        begun = choose_starts(slots, 1.0).begin
        assert begun
        for slot in left:
            if slot.incarnation in begun:
                slot.state = WorkerState.READY
        left = [slot for slot in left if slot.state is WorkerState.WAITING]


@pytest.mark.parametrize(
    ("num_cores", "serving", "starts"), [(1, True, 1), (2, True, 1), (16, True, 8), (1, False, 4), (16, False, 32)]
)
def test_the_number_of_workers_that_start_at_once_follows_the_cores(
    num_cores: float, serving: bool, starts: int
) -> None:
    assert max_starts(num_cores, serving=serving) == starts


def slot(name: str, state: WorkerState, **fields: object) -> Slot:
    made = Slot(Incarnation(WorkerId(name), 1), state)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def begun(*slots: Slot, num_cores: float | None = 2.0) -> list[str]:
    return [each.worker_id for each in choose_starts(slots, num_cores).begin]


def test_decode_workers_start_first_and_unknown_machines_bound_nothing() -> None:
    waiting = [slot("prefill-0", WorkerState.WAITING), slot("decode-1", WorkerState.WAITING)]
    waiting.append(slot("decode-0", WorkerState.WAITING))
    serving = slot("decode-2", WorkerState.READY)
    assert begun(serving, *waiting) == ["decode-0"]
    assert begun(serving, *waiting, num_cores=None) == ["decode-0", "decode-1", "prefill-0"]
    assert begun(*waiting) == ["decode-0", "decode-1", "prefill-0"]  # no worker serves that a start could slow down


def test_newcomers_wait_while_a_serving_worker_is_silent() -> None:
    newcomer = slot("decode-1", WorkerState.WAITING)
    assert begun(slot("decode-0", WorkerState.SILENT, has_served=True), newcomer) == []
    assert begun(slot("decode-0", WorkerState.READY, has_served=True), newcomer) == ["decode-1"]


def test_newcomers_withdraw_for_a_lost_worker_until_its_successor_has_a_place() -> None:
    asking = slot("decode-1", WorkerState.UNPLACED)
    newcomer = slot("prefill-1", WorkerState.WAITING)
    serving = slot("decode-2", WorkerState.READY, has_served=True)
    for state, fields in (
        (WorkerState.LOST, {}),
        (WorkerState.WAITING, {}),
        (WorkerState.STARTING, {"is_placed": False}),
    ):
        owed = slot("decode-0", state, has_served=True, **fields)
        chosen = choose_starts([asking, newcomer, serving, owed], 16.0)
        assert chosen.withdraw == (asking.incarnation,)
        assert newcomer.incarnation not in chosen.begin
    for state, fields in (
        (WorkerState.STARTING, {"is_placed": True}),
        (WorkerState.UNPLACED, {}),  # its request is already the earlier one
        (WorkerState.LOST, {"failures_in_a_row": 3}),  # it never becomes ready and blocks nobody
    ):
        owed = slot("decode-0", state, has_served=True, **fields)
        chosen = choose_starts([asking, newcomer, serving, owed], 16.0)
        assert (chosen.begin, chosen.withdraw) == ((newcomer.incarnation,), ())


def test_a_smaller_pool_keeps_a_silent_worker_and_drops_newcomers_first() -> None:
    states = [WorkerState.WAITING, WorkerState.UNPLACED, WorkerState.STARTING, WorkerState.SILENT, WorkerState.READY]
    pool = Pool("decode", len(states))
    for action, state in zip(pool.reconcile(0.0), states, strict=True):
        next(slot for slot in pool.slots if slot.incarnation == action.incarnation).state = state
    order = [slot.state for slot in choose_workers_to_remove(pool.slots, {}, len(states))]
    assert set(order[:2]) == {WorkerState.WAITING, WorkerState.UNPLACED}
    assert order[2] is WorkerState.STARTING
    pool.set_replicas(2)
    pool.reconcile(0.0)
    assert {slot.state for slot in pool.slots} == {WorkerState.SILENT, WorkerState.READY}


def test_a_withdrawn_worker_gets_a_new_incarnation_and_one_placed_late_waits_for_its_turn() -> None:
    pool = Pool("decode", 1)
    (action,) = pool.reconcile(0.0)
    assert pool.slots[0].state is WorkerState.WAITING
    pool.begin(action.incarnation)
    pool.on_unplaced(action.incarnation, "no room")
    pool.on_placed(action.incarnation)
    assert (pool.slots[0].state, pool.slots[0].is_placed) == (WorkerState.WAITING, True)
    pool.withdraw(action.incarnation)
    assert pool.slots[0].incarnation.number == action.incarnation.number + 1
    assert pool.slots[0].state in COMING
    assert pool.reconcile(0.0) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_the_successor_of_a_drained_worker_is_no_newcomer(at_once: bool) -> None:
    pool = Pool("decode", 1)
    (first,) = started(pool)
    make_ready(pool, first)
    pool.drain(first, replaced=True, at_once=at_once)
    if not at_once:
        assert pool.reconcile(0.0) == []
        pool.on_ended(first)
        pool.on_removed(first, 0.0)
    pool.reconcile(0.0)
    pool.set_replicas(3)
    pool.reconcile(0.0)
    waiting = [slot for slot in pool.slots if slot.state is WorkerState.WAITING]
    assert [slot.has_served for slot in waiting] == [True, False, False]


# Capacity.


def node(cpus: float, gpus: float = 0.0, **labels: str) -> NodeResources:
    return NodeResources({"CPU": cpus, "GPU": gpus, "memory": 1e9}, labels)


def plan(replicas: int, *nodes: str, cpus: float = 0.5, gpus: float = 0.0, ranks: int = 1, **labels: str) -> PoolPlan:
    share = ResourceShare(cpus, 1, gpus, node_labels=labels)
    return PoolPlan(WorkerNeed(share, ranks), replicas, nodes)


def test_a_node_of_four_cores_holds_six_workers_of_two_thirds_of_a_core() -> None:
    capacity = Capacity({"n": node(4.0)})
    fit = count_fitting(capacity, plan(2, "n", "n", cpus=0.66), [plan(1, "n", cpus=0.66)])
    assert fit.workers == 5  # 4 / 0.66 = 6, and one is a prefill worker
    assert fit.limit == "each needs CPU 0.66, and the nodes have CPU 4 in all"


def test_a_worker_of_several_ranks_needs_one_node_and_leftovers_do_not_add_up() -> None:
    capacity = Capacity({"a": node(8, gpus=4), "b": node(8, gpus=3)})
    assert count_fitting(capacity, plan(0, cpus=1, gpus=1, ranks=2), []).workers == 3
    assert count_fitting(capacity, plan(0, cpus=1, gpus=1, ranks=4), []).workers == 1
    assert count_fitting(capacity, plan(0, cpus=1, gpus=1, ranks=8), []).workers == 0


def test_room_for_the_other_pool_is_kept_and_labels_count() -> None:
    capacity = Capacity({"a": node(4, zone="x"), "b": node(4, zone="y")})
    assert count_fitting(capacity, plan(1, "a", cpus=1, zone="x"), [plan(0, cpus=1)]).workers == 4
    assert count_fitting(capacity, plan(1, "a", cpus=1, zone="x"), [plan(2, cpus=1)]).workers == 2
    assert count_fitting(capacity, plan(1, "gone", cpus=1, zone="x"), []).workers == 4  # its node no longer exists


def test_a_cluster_that_grows_holds_its_largest_size() -> None:
    capacity = Capacity({"a": node(4)}, growth={"CPU": 100.0})
    fit = count_fitting(capacity, plan(1, "a", cpus=2), [plan(10, cpus=1)])
    assert fit.workers == 45
    assert "the cluster grows to CPU 100 in all" in fit.limit
    assert count_fitting(Capacity({"a": node(4)}, growth={"GPU": 8.0}), plan(1, "a", cpus=2), []).workers == 2


def test_a_machines_memory_bounds_its_workers() -> None:
    capacity = Capacity({"n": node(64)}, memory=MemoryRoom(free_bytes=3.5 * 2**30, worker_bytes=2**30))
    fit = count_fitting(capacity, plan(2, "n", "n", cpus=1), [plan(2, "n", cpus=1)])
    assert (fit.workers, fit.limit) == (4, "each takes 1.0 GiB of memory, of which 3.5 are free")


@given(
    nodes=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    own=st.integers(0, 4),
    others=st.integers(0, 4),
    cpus=st.sampled_from([0.33, 0.5, 1.0, 1.5]),
    other_cpus=st.sampled_from([0.5, 2.0]),
)
def test_what_fits_can_be_packed_and_is_at_least_what_runs(
    nodes: list[int], own: int, others: int, cpus: float, other_cpus: float
) -> None:
    capacity = Capacity({str(name): node(float(size)) for name, size in enumerate(nodes)})
    left = [float(size) for size in nodes]
    places = []
    for _ in range(own):
        found = next((name for name, free in enumerate(left) if free >= cpus), None)
        if found is not None:
            left[found] -= cpus
            places.append(str(found))
    fit = count_fitting(capacity, plan(own, *places, cpus=cpus), [plan(others, cpus=other_cpus)])
    assert fit.workers >= len(places)
    assert fit.workers * cpus <= sum(nodes) + 1e-3
    more = count_fitting(capacity, plan(own, *places, cpus=cpus), [plan(others + 1, cpus=other_cpus)])
    assert more.workers <= fit.workers
