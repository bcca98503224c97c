"""Tests when running sequences are rebalanced and which: first the policy, then rounds over fake decode workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.commands.inspecting.status import format_status
from cluster.lifecycle.migrate.migration_policy import MigratableSequence, TargetRoom
from cluster.lifecycle.migrate.rebalance_policy import RebalancePolicy, RebalanceShift, WorkerFill, choose_sequences
from cluster.lifecycle.migrate.rebalance_runner import RebalanceRunner
from cluster.pools.pool import Incarnation
from penstock.config import ServeConfig
from penstock.config.autoscaler import BalanceConfig
from penstock.rpc.server import make_channel
from penstock.types import Epoch, Member, RequestId, Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2
from tests.cluster.lifecycle.test_drain import FakeDecode, serving
from tests.support.suite.examples import examples

CONFIG = BalanceConfig(gap=0.3, full=0.5, lasting_s=10.0, cooldown_s=15.0)


def full(number: int, pages: float, sequences: float = 0.0) -> WorkerFill:
    return WorkerFill(Member(WorkerId(f"decode-{number}"), Epoch(number + 1), Role.DECODE, ""), pages, sequences)


def test_a_lasting_imbalance_is_reduced_with_a_pause_after_each_shift() -> None:
    balance, moved = RebalancePolicy(CONFIG), []
    for now_s in range(60):
        shift = balance.decide([full(0, 0.9), full(1, 0.1), full(2, 0.5)], float(now_s))
        if shift is not None:
            moved.append(now_s)
            assert (shift.source.worker_id, shift.target.worker_id) == ("decode-0", "decode-1")
            assert shift.share == pytest.approx(0.4)
            assert "90% of its pages were in use against 10% at decode-1" in shift.reason
    assert moved == [10, 25, 40, 55]


def test_an_imbalance_that_comes_and_goes_is_left_alone() -> None:
    balance = RebalancePolicy(CONFIG)
    for now_s in range(100):
        gap = 0.6 if now_s % 8 else 0.0
        assert balance.decide([full(0, 0.3 + gap), full(1, 0.3)], float(now_s)) is None


def test_a_missing_report_does_not_count_as_an_empty_worker() -> None:
    balance = RebalancePolicy(CONFIG)
    for now_s in range(40):
        assert balance.decide([full(0, 0.9), None], float(now_s)) is None
    assert (
        balance.decide([full(0, 0.9), full(1, 0.0)], 40.0) is None
    )  # the imbalance lasts only since both reports arrived
    assert balance.decide([full(0, 0.9), full(1, 0.0)], 50.0) is not None


shares = st.floats(0, 1)
steps_ = st.lists(st.lists(st.none() | st.tuples(shares, shares), max_size=4), max_size=60)


@given(steps_)
def test_every_shift_has_a_sufficient_gap_duration_and_cooldown(steps: list[list[tuple[float, float] | None]]) -> None:
    balance, last_s = RebalancePolicy(CONFIG), float("-inf")
    for number, step in enumerate(steps):
        now_s = 2.0 * number
        workers = [full(place, *each) if each is not None else None for place, each in enumerate(step)]
        shift = balance.decide(workers, now_s)
        if shift is None:
            continue
        known = {each.member: each for each in workers if each is not None}
        source, target = known[shift.source], known[shift.target]
        assert None not in workers
        assert source.share - target.share >= CONFIG.gap
        assert source.share == max(each.share for each in known.values())
        assert source.share >= CONFIG.full
        assert now_s - last_s >= CONFIG.cooldown_s
        assert now_s >= CONFIG.lasting_s
        assert 0 < shift.share <= 0.5
        last_s = now_s


sizes_ = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), max_size=30)


@given(sizes_, st.floats(0.05, 0.5), st.booleans(), st.integers(0, 2000), st.integers(1, 12))
def test_no_more_sequences_migrate_than_even_out_the_workers(
    sizes: list[tuple[int, int]], share: float, by_pages: bool, free_tokens: int, most: int
) -> None:
    sequences = [MigratableSequence(RequestId(f"r{place}"), *each) for place, each in enumerate(sizes)]
    shift = RebalanceShift(full(0, 0.9).member, full(1, 0.1).member, by_pages, share, "")
    room = TargetRoom(WorkerId("decode-1"), Epoch(2), "", free_tokens, 10)
    tokens = {each.request_id: each.num_tokens for each in sequences}
    moves = choose_sequences(shift, sequences, room, 2000, 40, most)
    moved = [request_id for move in moves for request_id in move.request_ids]
    assert len(moved) == len(set(moved)) <= most
    assert sum(tokens[each] for each in moved) <= free_tokens
    if by_pages:
        assert sum(tokens[each] for each in moved) <= share * 2000
    else:
        assert len(moved) <= share * 40


@examples(30)
@given(st.lists(st.integers(20, 300), min_size=1, max_size=12), st.lists(st.integers(20, 300), max_size=12))
def test_rebalancing_settles_and_never_empties_the_fuller_worker_below_the_other(
    left: list[int], right: list[int]
) -> None:
    """Sequences that never end run on two workers with room for 2500 tokens each."""
    balance, capacity = RebalancePolicy(CONFIG), 2500
    held = [left, right]
    for number in range(100):
        before = [sum(each) / capacity for each in held]
        shift = balance.decide([full(place, share) for place, share in enumerate(before)], 2.0 * number)
        if shift is None:
            continue
        source, target = (int(each.worker_id.removeprefix("decode-")) for each in (shift.source, shift.target))
        room = TargetRoom(shift.target.worker_id, shift.target.epoch, "", capacity - sum(held[target]), 100)
        sequences = [MigratableSequence(RequestId(str(place)), size, 1000) for place, size in enumerate(held[source])]
        for move in choose_sequences(shift, sequences, room, capacity, 100, 8):
            gone = {int(each) for each in move.request_ids}
            held[target] += [size for place, size in enumerate(held[source]) if place in gone]
            held[source] = [size for place, size in enumerate(held[source]) if place not in gone]
        assert sum(held[source]) >= sum(held[target])
    uneven = abs(sum(held[0]) - sum(held[1])) / capacity
    assert (
        uneven < CONFIG.gap
        or max(map(sum, held)) < CONFIG.full * capacity
        or max(map(max, filter(None, held))) > (uneven / 2 * capacity)
    )


@dataclass
class FakeFleet:
    """Holds two decode workers and their latest loads."""

    known: Sequence[Member] = ()
    reported: dict[str, worker_pb2.Load] = field(default_factory=dict)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    is_busy: bool = False

    def members(self, role: Role) -> Sequence[Member]:
        return self.known

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        return self.reported.get(member.worker_id)

    def loads(self) -> dict[Incarnation, tuple[worker_pb2.Load, float]]:
        return {Incarnation(WorkerId(name), 1): (load, 0.0) for name, load in self.reported.items()}

    def note(self, subject: str, what: str, reason: str, epoch: Epoch) -> None:
        self.notes.append((subject, what, reason))


async def test_a_round_migrates_what_evens_out_the_workers_and_reports_it() -> None:
    source, target = FakeDecode({"a": 320, "b": 160, "c": 800}), FakeDecode()
    config = ServeConfig.model_validate({"model": "m", "balance": {"lasting_s": 0.0, "stale_s": 5.0}})
    async with serving(source) as from_, serving(target) as to:
        fleet = FakeFleet(
            [
                Member(WorkerId("decode-0"), Epoch(1), Role.DECODE, from_),
                Member(WorkerId("decode-1"), Epoch(2), Role.DECODE, to),
            ],
            {
                "decode-0": worker_pb2.Load(total_pages=100, free_pages=20, num_open=3),
                "decode-1": worker_pb2.Load(total_pages=100, free_pages=100),
            },
        )
        balancing = RebalanceRunner(config, fleet, lambda: fleet.is_busy, fleet.note, make_channel)
        await balancing.step(6.0)  # the reports are too old
        fleet.is_busy = True
        await balancing.step(4.0)
        assert source.asked == []
        fleet.is_busy = False
        await balancing.step(4.0)
    assert list(source.asked[0].request_ids) == ["a", "b"] or list(source.asked[0].request_ids) == ["b", "a"]
    assert fleet.notes == [
        (
            "decode-0",
            "balanced",
            "2 sequences to decode-1: 80% of its pages were in use against 0% at decode-1, uneven for 0 s",
        )
    ]
    status = balancing.status()
    assert (status.enabled, status.rounds, status.migrated, status.failed) == (True, 1, 2, 0)
    assert "rebalanced: 2 sequences in 1 rounds" in format_status(admin_pb2.StatusResponse(balance=status))
