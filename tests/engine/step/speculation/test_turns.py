"""Tests that speculation loses at most a hundredth of the time and a few steps, whatever it costs and yields."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step.speculation.turns import SpeculationMode, SpeculationTurns

_TRIALS_OF_AN_ACCOUNT = 8 + (8 + 9) + 8 * 2  # first credit, the dearest step, and eight plain steps after it


def lost_steps(
    seed: int,
    modes: list[SpeculationMode],
    sizes: list[int],
    cost: float,
    search: float,
    late: float,
    num_steps: int = 6000,
) -> tuple[float, float]:
    """Returns the most steps lost beyond a hundredth of the time at any moment, and the total of time lost.

    Times are in plain steps, which take 1 for any number of sequences. A step that verifies takes up to `1 + cost`, a
    search up to `search`, and plain steps after verification up to `1 + late`. How many tokens hold and all these times
    change at random, in each mode on its own.
    """
    rng = random.Random(seed)
    turns = SpeculationTurns(modes)
    taken = worth = worst = 0.0
    num_late, yields, costs = 0, dict.fromkeys(modes, 0.0), dict.fromkeys(modes, 0.0)
    for step in range(num_steps):
        if step % 200 == 0:
            yields = {mode: rng.choice([0.0, 0.2, 1.0, 8.0]) * rng.random() for mode in modes}
            costs = {mode: cost * rng.random() for mode in modes}
        size = sizes[step // 37 % len(sizes)]
        mode = turns.mode(size)
        searched = 0.0 if mode is SpeculationMode.PLAIN else search * rng.random()
        late_s = late * rng.random() if num_late else 0.0
        if mode is not SpeculationMode.PLAIN and rng.random() < 0.7:
            elapsed, held = 1 + costs[mode], yields[mode]
            turns.on_verified(size, elapsed, searched, 1 + held, 9.0, 1.0)
            turns.on_steps(size, 1, 1.0, measured=False)
            num_late = 8
        else:
            elapsed, held = 1 + late_s, 0.0
            measured = turns.is_settled and mode is SpeculationMode.PLAIN
            turns.on_plain(size, elapsed, searched, 1.0, tapped=False)
            turns.on_steps(size, 1, 1.0, measured=measured)
            num_late = max(0, num_late - 1)
        taken += elapsed + searched
        worth += 1 + held
        worst = max(worst, taken - worth - 0.01 * worth)
    return worst, taken - worth


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    modes=st.sampled_from([[SpeculationMode.LOOKUPS], [SpeculationMode.LOOKUPS, SpeculationMode.DRAFTS]]),
    sizes=st.sampled_from([[1], [16], [1, 4, 16], [*range(1, 20)]]),
    cost=st.floats(0, 9),
    search=st.floats(0, 8),
    late=st.floats(0, 2),
)
def test_at_most_a_hundredth_of_the_time_and_a_few_steps_are_lost(
    seed: int, modes: list[SpeculationMode], sizes: list[int], cost: float, search: float, late: float
) -> None:
    """At any moment, not just at the end: an account is charged with all that differs from plain steps."""
    assert lost_steps(seed, modes, sizes, cost, search, late)[0] <= len(modes) * _TRIALS_OF_AN_ACCOUNT


Outcome = tuple[float, float]  # of a step that verified: its time, and what its tokens would have taken


def count_modes(outcomes: Mapping[SpeculationMode, Outcome]) -> Counter[SpeculationMode]:
    """Plays 4000 steps of one sequence, and returns how many had each mode. Plain steps take 1."""
    turns, counts = SpeculationTurns([*outcomes]), Counter[SpeculationMode]()
    for _ in range(4000):
        mode = turns.mode(1)
        counts[mode] += 1
        if mode is SpeculationMode.PLAIN:
            measured = turns.is_settled
            turns.on_plain(1, 1.0, 0.0, 1.0, tapped=False)
            turns.on_steps(1, 1, 1.0, measured=measured)
        else:
            elapsed_s, num_plain = outcomes[mode]
            turns.on_verified(1, elapsed_s, 0.0, num_plain, 9.0, 1.0)
            turns.on_steps(1, 1, 1.0, measured=False)
    return counts


def test_a_mode_that_gains_keeps_most_steps() -> None:
    assert count_modes({SpeculationMode.LOOKUPS: (1.2, 4.0)})[SpeculationMode.LOOKUPS] > 3500


@pytest.mark.parametrize("better", [SpeculationMode.LOOKUPS, SpeculationMode.DRAFTS])
def test_the_mode_that_gains_more_gets_most_turns_and_the_other_is_not_closed(better: SpeculationMode) -> None:
    modes = (SpeculationMode.LOOKUPS, SpeculationMode.DRAFTS)
    counts = count_modes({mode: (1.2 if mode is better else 2.0, 4.0) for mode in modes})
    [other] = (mode for mode in modes if mode is not better)
    assert counts[better] > counts[other] > 0


def test_a_mode_that_loses_does_not_close_the_other() -> None:
    counts = count_modes({SpeculationMode.LOOKUPS: (2.0, 4.0), SpeculationMode.DRAFTS: (2.0, 1.0)})
    assert counts[SpeculationMode.LOOKUPS] > 3000
    assert counts[SpeculationMode.DRAFTS] < 50


def test_each_batch_size_has_turns_and_plain_steps_of_its_own() -> None:
    """Plain steps of another size show nothing about these."""
    turns = SpeculationTurns([SpeculationMode.LOOKUPS])
    for size, count in ((1, 100), (2, 15)):
        for _ in range(count):
            turns.on_plain(size, 1.0, 0.0, 1.0, tapped=False)
            turns.on_steps(size, 1, 1.0, measured=True)
    assert turns.mode(1) is SpeculationMode.LOOKUPS
    assert turns.mode(2) is SpeculationMode.PLAIN
