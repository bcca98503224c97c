"""Tests that each batch of events is applied once and in order, or its loss is noticed, for any delivery."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.engines.event_sequence import EventSequence, Verdict


def follow(sequence: EventSequence, lives: list[tuple[int, list[int], int]]) -> list[list[tuple[int, int]]]:
    """Follows publishers one after the other. Each life gives how many batches a publisher sends, which of them are
    lost, and how many of the last ones it keeps for replays. Returns the applied batches since each loss."""
    pictures: list[list[tuple[int, int]]] = [[]]
    for life, (count, lost, kept) in enumerate(lives):
        for seq in range(count):
            if seq not in lost:
                _deliver(sequence, pictures, life, seq, range(max(0, seq + 1 - kept), seq + 1))
    return pictures


def _deliver(sequence: EventSequence, pictures: list, life: int, seq: int, replays: range) -> None:
    verdict = sequence.on_live(seq)
    if verdict is Verdict.RESTARTED:
        pictures.append([])
        verdict = Verdict.MISSING if seq else sequence.on_replayed(seq)
    if verdict is Verdict.MISSING:
        for each in [*replays, seq]:
            found = sequence.on_replayed(each)
            if found is Verdict.MISSING:
                pictures.append([])
            if found is not Verdict.DROP:
                pictures[-1].append((life, each))
    elif verdict is Verdict.APPLY:
        pictures[-1].append((life, seq))


@given(count=st.integers(0, 12), lost=st.lists(st.integers(0, 11)), kept=st.integers(0, 12), restarts=st.integers(0, 2))
def test_applied_batches_have_no_gaps(count: int, lost: list[int], kept: int, restarts: int) -> None:
    lives = [(count, lost, kept)] * (restarts + 1)
    for picture in follow(EventSequence(), lives):
        seqs = [seq for _, seq in picture]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
        assert len({life for life, _ in picture}) <= 1


@given(lost=st.lists(st.integers(0, 10)))
def test_nothing_is_lost_while_the_publisher_can_replay_it(lost: list[int]) -> None:
    pictures = follow(EventSequence(), [(12, lost, 12)])
    assert pictures == [[(0, seq) for seq in range(12)]]


def test_a_gap_without_replays_is_noticed() -> None:
    sequence = EventSequence()
    assert [sequence.on_live(0), sequence.on_live(2)] == [Verdict.APPLY, Verdict.MISSING]
    assert sequence.on_replayed(2) is Verdict.MISSING
    assert sequence.on_live(3) is Verdict.APPLY


def test_a_replay_that_overlaps_live_batches_is_applied_once() -> None:
    sequence = EventSequence()
    assert [sequence.on_replayed(seq) for seq in range(3)] == [Verdict.APPLY] * 3
    assert [sequence.on_live(seq) for seq in (1, 2, 3)] == [Verdict.DROP, Verdict.DROP, Verdict.APPLY]


def test_a_restarted_publisher_voids_everything() -> None:
    sequence = EventSequence()
    for seq in range(4):
        sequence.on_live(seq)
    assert sequence.on_live(0) is Verdict.RESTARTED
    assert sequence.on_replayed(0) is Verdict.APPLY
    assert sequence.on_live(1) is Verdict.APPLY
