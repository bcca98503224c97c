"""When running sequences move between decode workers and which: the decision, then rounds over workers played here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.balance import Balance, Fullness, Shift, choose
from cluster.balancing import Balancing
from cluster.moves import Movable, Room
from cluster.pool import Incarnation
from cluster.terminal import format_status
from penstock.autoscaler_config import BalanceConfig
from penstock.config import ServeConfig
from penstock.grpc_server import make_channel
from penstock.types import Epoch, Member, RequestId, Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2
from tests.test_cluster_drain import FakeDecode, serving

CONFIG = BalanceConfig(gap=0.3, full=0.5, lasting_s=10.0, cooldown_s=15.0)


def full(number: int, pages: float, sequences: float = 0.0) -> Fullness:
    return Fullness(Member(WorkerId(f"decode-{number}"), Epoch(number + 1), Role.DECODE, ""), pages, sequences)


def test_only_what_is_uneven_for_long_is_mended_and_with_pauses() -> None:
    balance, moved = Balance(CONFIG), []
    for now_s in range(60):
        shift = balance.decide([full(0, 0.9), full(1, 0.1), full(2, 0.5)], float(now_s))
        if shift is not None:
            moved.append(now_s)
            assert (shift.source.worker_id, shift.target.worker_id) == ("decode-0", "decode-1")
            assert shift.share == pytest.approx(0.4)
            assert "90% of its pages were in use beside 10% at decode-1" in shift.reason
    assert moved == [10, 25, 40, 55]


def test_an_imbalance_that_comes_and_goes_is_left_alone() -> None:
    balance = Balance(CONFIG)
    for now_s in range(100):
        gap = 0.6 if now_s % 8 else 0.0
        assert balance.decide([full(0, 0.3 + gap), full(1, 0.3)], float(now_s)) is None


def test_what_is_missing_is_not_zero() -> None:
    balance = Balance(CONFIG)
    for now_s in range(40):
        assert balance.decide([full(0, 0.9), None], float(now_s)) is None
    assert balance.decide([full(0, 0.9), full(1, 0.0)], 40.0) is None  # counted from when it is known
    assert balance.decide([full(0, 0.9), full(1, 0.0)], 50.0) is not None


shares = st.floats(0, 1)
looks = st.lists(st.lists(st.none() | st.tuples(shares, shares), max_size=4), max_size=60)


@given(looks)
def test_every_shift_is_due(steps: list[list[tuple[float, float] | None]]) -> None:
    balance, last_s = Balance(CONFIG), float("-inf")
    for number, step in enumerate(steps):
        now_s = 2.0 * number
        workers = [full(place, *one) if one is not None else None for place, one in enumerate(step)]
        shift = balance.decide(workers, now_s)
        if shift is None:
            continue
        known = {one.member: one for one in workers if one is not None}
        source, target = known[shift.source], known[shift.target]
        assert None not in workers
        assert source.share - target.share >= CONFIG.gap
        assert source.share == max(one.share for one in known.values())
        assert source.share >= CONFIG.full
        assert now_s - last_s >= CONFIG.cooldown_s
        assert now_s >= CONFIG.lasting_s
        assert 0 < shift.share <= 0.5
        last_s = now_s


sizes_ = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), max_size=30)


@given(sizes_, st.floats(0.05, 0.5), st.booleans(), st.integers(0, 2000), st.integers(1, 12))
def test_no_more_goes_than_evens_out(
    sizes: list[tuple[int, int]], share: float, by_pages: bool, free_tokens: int, most: int
) -> None:
    sequences = [Movable(RequestId(f"r{place}"), *one) for place, one in enumerate(sizes)]
    shift = Shift(full(0, 0.9).member, full(1, 0.1).member, by_pages, share, "")
    room = Room(WorkerId("decode-1"), Epoch(2), "", free_tokens, 10)
    tokens = {one.request_id: one.num_tokens for one in sequences}
    moved = [one for move in choose(shift, sequences, room, 2000, 40, most) for one in move.request_ids]
    assert len(moved) == len(set(moved)) <= most
    assert sum(tokens[one] for one in moved) <= free_tokens
    if by_pages:
        assert sum(tokens[one] for one in moved) <= share * 2000
    else:
        assert len(moved) <= share * 40


@settings(max_examples=30)
@given(st.lists(st.integers(20, 300), min_size=1, max_size=12), st.lists(st.integers(20, 300), max_size=12))
def test_it_settles_and_no_two_workers_ever_change_places(left: list[int], right: list[int]) -> None:
    """Sequences that do not end, on two workers of 2500 tokens each."""
    balance, capacity = Balance(CONFIG), 2500
    held = [left, right]
    for number in range(100):
        before = [sum(one) / capacity for one in held]
        shift = balance.decide([full(place, share) for place, share in enumerate(before)], 2.0 * number)
        if shift is None:
            continue
        source, target = (int(one.worker_id.removeprefix("decode-")) for one in (shift.source, shift.target))
        room = Room(shift.target.worker_id, shift.target.epoch, "", capacity - sum(held[target]), 100)
        sequences = [Movable(RequestId(str(place)), size, 1000) for place, size in enumerate(held[source])]
        for move in choose(shift, sequences, room, capacity, 100, 8):
            gone = {int(one) for one in move.request_ids}
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
class Played:
    """Two decode workers and what they have told."""

    known: Sequence[Member] = ()
    told: dict[str, worker_pb2.Load] = field(default_factory=dict)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    is_busy: bool = False

    def members(self, role: Role) -> Sequence[Member]:
        return self.known

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        return self.told.get(member.worker_id)

    def loads(self) -> dict[Incarnation, tuple[worker_pb2.Load, float]]:
        return {Incarnation(WorkerId(name), 1): (load, 0.0) for name, load in self.told.items()}

    def note(self, subject: str, what: str, reason: str, epoch: Epoch) -> None:
        self.notes.append((subject, what, reason))


async def test_a_round_moves_what_evens_out_and_is_told() -> None:
    source, target = FakeDecode({"a": 320, "b": 160, "c": 800}), FakeDecode()
    config = ServeConfig.model_validate({"model": "m", "balance": {"lasting_s": 0.0, "stale_s": 5.0}})
    async with serving(source) as from_, serving(target) as to:
        played = Played(
            [
                Member(WorkerId("decode-0"), Epoch(1), Role.DECODE, from_),
                Member(WorkerId("decode-1"), Epoch(2), Role.DECODE, to),
            ],
            {
                "decode-0": worker_pb2.Load(total_pages=100, free_pages=20, num_open=3),
                "decode-1": worker_pb2.Load(total_pages=100, free_pages=100),
            },
        )
        balancing = Balancing(config, played, lambda: played.is_busy, played.note, make_channel)
        await balancing.step(6.0)  # what was told is too old
        played.is_busy = True
        await balancing.step(4.0)
        assert source.asked == []
        played.is_busy = False
        await balancing.step(4.0)
    assert list(source.asked[0].request_ids) == ["a", "b"] or list(source.asked[0].request_ids) == ["b", "a"]
    assert played.notes == [
        (
            "decode-0",
            "balanced",
            "2 sequences to decode-1: 80% of its pages were in use beside 0% at decode-1, uneven for 0 s",
        )
    ]
    told = balancing.tell()
    assert (told.enabled, told.rounds, told.moved, told.failed) == (True, 1, 2, 0)
    assert "evened out: 2 sequences in 1 rounds" in format_status(admin_pb2.StatusResponse(balance=told))
