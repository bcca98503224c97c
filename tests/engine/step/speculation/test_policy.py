"""The policy verifies what raises the expected tokens per second, and the ledger bounds what it may lose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step.sequence import Sequence
from engine.step.speculation.prompt_lookup import Proposal
from engine.step.speculation.speculation_policy import Candidate, SpeculationLedger, choose_lengths
from engine.step.speculation.speculator import Speculator
from engine.step.speculation.step_cost_table import StepCostTable
from penstock.types import Grammar, GrammarKind, RequestId, SamplingParams


def table(fixed_s: float, token_s: float, sizes: range = range(1, 40)) -> StepCostTable:
    costs = StepCostTable()
    for size in sizes:
        costs.observe(size, fixed_s + token_s * size)
    return costs


@given(
    others=st.integers(0, 6),
    candidates=st.lists(st.builds(Candidate, st.integers(0, 4), st.floats(0.01, 0.99)), min_size=1, max_size=3),
    token_s=st.floats(0, 0.5),
)
def test_no_other_lengths_promise_more(others: int, candidates: list[Candidate], token_s: float) -> None:
    costs, count = table(1.0, token_s), others + len(candidates)

    def promise(lengths: tuple[int, ...]) -> float:
        expected = count + sum(
            each.rate ** (place + 1)
            for each, length in zip(candidates, lengths, strict=True)
            for place in range(length)
        )
        return expected / costs.predict(count + sum(lengths))

    chosen = choose_lengths(count, candidates, costs)
    assert all(0 <= length <= each.num_tokens for length, each in zip(chosen, candidates, strict=True))
    best = max(map(promise, itertools.product(*(range(each.num_tokens + 1) for each in candidates))))
    plain = promise((0,) * len(candidates))
    assert promise(tuple(chosen)) == pytest.approx(best if best > 1.05 * plain + 1e-9 else plain, rel=1e-6)


def test_costs_are_interpolated_smoothed_and_robust() -> None:
    costs = StepCostTable()
    costs.observe(1, 1.0)
    costs.observe(5, 3.0)
    assert costs.predict(3) == 2.0
    assert costs.predict(9) > 3.0
    assert costs.knows(5)
    assert not costs.knows(3)
    costs.observe(1, 1000.0)
    assert costs.predict(1) < 1.5


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FixedProposer:
    def __init__(self, clock: Clock, right: float) -> None:
        self._clock, self._right, self._asked = clock, right, 0

    def propose(self, token_ids: list[int], count: int) -> Proposal | None:
        self._asked += 1
        self._clock.now_s += 1e-4
        is_right = self._asked * self._right % 1 + self._right >= 1  # evenly spread
        return Proposal((1 if is_right else 2,) * count, 0)


def run(num_sequences: int, right: float, fixed_s: float, token_s: float, num_steps: int = 2000) -> tuple[float, int]:
    """Returns the throughput relative to no speculation, and how many tokens were proposed; the text is all ones."""
    clock = Clock()
    speculator = Speculator(8, clock, make_proposer=lambda _: FixedProposer(clock, right))
    sampling = SamplingParams(max_tokens=1 << 30)
    sequences = [Sequence(RequestId(str(n)), [1, 1], 1, sampling, b"") for n in range(num_sequences)]
    num_tokens = num_proposed = 0
    for _ in range(num_steps):
        began_s, chosen = clock.now_s, {}
        if speculator.may_pay(num_sequences):
            chosen = speculator.propose(sequences, lambda _: 1 << 30, 128)
        count = sum(map(len, chosen.values()))
        clock.now_s += fixed_s + token_s * (num_sequences + count)
        further = 0
        for sequence in sequences:
            proposed = chosen.get(sequence, ())
            held = len(proposed) if proposed and proposed[0] == 1 else 0
            sequence.token_ids += [1] * (1 + held)
            further += held
            if proposed:
                speculator.on_verified(sequence, len(proposed), held)
        speculator.on_step(num_sequences, count, further, clock.now_s - began_s)
        num_tokens += num_sequences + further
        num_proposed += count
    plain_s = num_tokens / num_sequences * (fixed_s + token_s * num_sequences)
    return plain_s / clock.now_s, num_proposed


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.01, 0.0005), (0.001, 0.001), (0.0, 0.01)])
def test_speculation_never_costs(num_sequences: int, right: float, fixed_s: float, token_s: float) -> None:
    """Virtual time: whether or not proposals are right, and whether a step's cost is fixed or by the token."""
    gain, num_proposed = run(num_sequences, right, fixed_s, token_s)
    assert gain > 0.99
    if right == 1.0 and fixed_s > 20 * token_s * num_sequences - 1e-9:
        assert gain > 3
    if fixed_s == 0.0:  # nothing can be won; a few attempts tell what wider steps cost
        assert num_proposed < 200


def test_the_ledger_closes_when_more_was_lost_than_a_small_share_of_the_time() -> None:
    ledger = SpeculationLedger()
    assert not ledger.is_open
    ledger.on_step(1.0, 1.0)
    assert ledger.is_open
    ledger.add(-2.0, 1.0)
    assert not ledger.is_open
    for _ in range(400):
        ledger.on_step(1.0, 1.0)
    assert ledger.is_open


def test_grammars_and_first_tokens_are_left_alone() -> None:
    clock = Clock()
    speculator = Speculator(4, clock, always=True, make_proposer=lambda _: FixedProposer(clock, 1.0))
    plain = Sequence(RequestId("plain"), [1, 1], 1, SamplingParams(max_tokens=9), b"")
    ruled = SamplingParams(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, "a*"))
    others = [
        Sequence(RequestId("ruled"), [1, 1], 1, ruled, b""),
        Sequence(RequestId("first"), [1, 1], 2, SamplingParams(max_tokens=9), b""),
    ]
    lefts = {plain: 3, others[0]: 9, others[1]: 9}
    assert speculator.propose([plain, *others], lefts.__getitem__, 100) == {plain: (1, 1)}  # one more is sampled
    assert speculator.propose([plain], lambda _: 1, 100) == {}
    assert speculator.propose([plain], lambda _: 9, 1) == {plain: (1,)}
