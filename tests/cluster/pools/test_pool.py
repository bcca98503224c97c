"""Tests the bookkeeping of a pool and the division of a machine's resources. Starts nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools.pool import Incarnation, Pool, Start, Stop, WorkerState
from cluster.pools.resources import divide_resources, num_cpus_needed, with_device_defaults
from penstock.config import PoolConfig, ServeConfig
from penstock.types import Epoch, WorkerId


def started(pool: Pool, now_s: float = 0.0) -> list[Incarnation]:
    actions = pool.reconcile(now_s)
    assert all(isinstance(action, Start) for action in actions)
    for action in actions:
        pool.begin(action.incarnation)
    return [action.incarnation for action in actions]


def make_ready(pool: Pool, incarnation: Incarnation, epoch: int = 7) -> None:
    pool.on_ready(incarnation, Epoch(epoch), "127.0.0.1:1", 1234)


def lose(pool: Pool, incarnation: Incarnation, now_s: float = 0.0) -> None:
    pool.on_lost(incarnation, "killed")
    pool.on_removed(incarnation, now_s)


def test_every_worker_is_started_once() -> None:
    pool = Pool("decode", 2)
    assert started(pool) == [Incarnation(WorkerId("decode-0"), 1), Incarnation(WorkerId("decode-1"), 1)]
    assert started(pool) == []
    assert not pool.is_complete


def test_a_lost_ready_worker_is_replaced_at_once_and_counted() -> None:
    pool = Pool("decode", 1)
    (first,) = started(pool)
    make_ready(pool, first)
    assert pool.is_complete
    pool.on_lost(first, "killed")
    (slot,) = pool.slots
    assert (slot.state, slot.detail) == (WorkerState.LOST, "killed")
    assert started(pool, 5.0) == []  # the lost process still holds its resources
    assert pool.next_retry_s() is None
    pool.on_removed(first, 5.0)
    assert started(pool, 5.0) == [Incarnation(WorkerId("decode-0"), 2)]
    (slot,) = pool.slots
    assert (slot.state, slot.num_restarts, slot.epoch, slot.address) == (WorkerState.STARTING, 1, 0, "")


def test_a_worker_that_never_becomes_ready_is_retried_at_growing_intervals() -> None:
    pool = Pool("decode", 1)
    waits = []
    now_s = 0.0
    for _ in range(9):
        (incarnation,) = started(pool, now_s)
        lose(pool, incarnation, now_s)
        retry_s = pool.next_retry_s()
        assert retry_s is not None
        waits.append(retry_s - now_s)
        assert started(pool, retry_s - 0.001) == [] or retry_s == now_s
        now_s = retry_s
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    (incarnation,) = started(pool, now_s)
    make_ready(pool, incarnation)
    lose(pool, incarnation, now_s)
    assert pool.next_retry_s() == now_s


def test_events_of_a_dead_incarnation_do_not_touch_its_successor() -> None:
    pool = Pool("prefill", 1)
    (first,) = started(pool)
    lose(pool, first)
    (second,) = started(pool)
    make_ready(pool, first)
    pool.on_progress(first, "loading weights 5%")
    (slot,) = pool.slots
    assert (slot.state, slot.detail) == (WorkerState.STARTING, "")
    make_ready(pool, second, epoch=9)
    lose(pool, first)
    assert (slot.state, slot.epoch) == (WorkerState.READY, 9)


def test_a_smaller_pool_stops_the_highest_numbers() -> None:
    pool = Pool("decode", 3)
    first, second, third = started(pool)
    make_ready(pool, first)
    lose(pool, second)
    pool.set_replicas(1)
    assert pool.reconcile(0.0) == [Stop(third)]  # the second has already ended
    assert pool.is_complete
    make_ready(pool, third)
    assert [slot.worker_id for slot in pool.ready()] == ["decode-0"]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ready", "lost", "removed", "resize", "tick"]), st.integers(0, 3)), max_size=60
)


@given(EVENTS)
def test_random_histories_keep_at_most_one_incarnation_of_each_worker(events: list[tuple[str, int]]) -> None:
    pool, now_s = Pool("decode", 2), 0.0
    running: set[Incarnation] = set()
    seen: set[Incarnation] = set()
    for event, number in events:
        now_s += 1.0
        chosen = sorted(running, key=str)[number % len(running)] if running else None
        if event == "resize":
            pool.set_replicas(number)
        elif chosen and event == "ready":
            make_ready(pool, chosen)
        elif chosen and event == "lost":
            pool.on_lost(chosen, "killed")
        elif chosen and event == "removed":
            pool.on_lost(chosen, "killed")
            running.discard(chosen)
            pool.on_removed(chosen, now_s)
        for action in pool.reconcile(now_s):
            if isinstance(action, Start):
                assert action.incarnation not in seen
                seen.add(action.incarnation)
                running.add(action.incarnation)
            else:
                running.discard(action.incarnation)
        held = [slot.incarnation for slot in pool.slots]
        assert len({each.worker_id for each in held}) == len(held) == pool.replicas
        assert all(slot.incarnation in running for slot in pool.ready())


def config(**changes: object) -> ServeConfig:
    return ServeConfig.model_validate({"model": "m", **changes})


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
def test_the_default_division_always_fits(cores: int) -> None:
    served = config(prefill_pool=PoolConfig(replicas=1), decode_pool=PoolConfig(replicas=2))
    shares = divide_resources(served, cores)
    assert num_cpus_needed(served, shares) <= cores
    assert all(share.num_threads >= 1 for share in shares.values())
    assert shares["decode"].environment()["OMP_NUM_THREADS"] == str(max(1, cores // 3))


def test_a_lone_worker_gets_the_whole_machine_unless_its_pool_says_otherwise() -> None:
    alone = config(prefill_pool=PoolConfig(replicas=0))
    assert divide_resources(alone, 8)["decode"].num_threads == 8
    named = config(decode_pool=PoolConfig(num_cpus=6, resources={"fast": 1}))
    shares = divide_resources(named, 8)
    assert (shares["decode"].num_cpus, shares["decode"].num_threads) == (6, 6)
    assert shares["decode"].resources == {"fast": 1}
    assert shares["prefill"].num_cpus == 4


@pytest.mark.parametrize(
    ("workers", "gpus", "each"), [(2, 0, 0.0), (2, 4, 1.0), (2, 1, 0.5), (3, 2, 0.5), (8, 3, 0.33)]
)
def test_gpus_are_divided_so_that_no_part_spans_two(workers: int, gpus: int, each: float) -> None:
    served = config(decode_pool=PoolConfig(replicas=workers - 1))
    shares = divide_resources(served, 4, gpus)
    assert shares["decode"].num_gpus == each
    assert with_device_defaults(served, shares).decode.max_batch_sequences == (256 if each else 64)
    assert divide_resources(config(engine={"device": "cpu"}), 4, gpus)["decode"].num_gpus == 0.0
