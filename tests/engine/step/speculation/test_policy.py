"""Tests that the policy verifies what raises the expected tokens per second, and that the ledger bounds its losses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step.sequence import Sequence
from engine.step.speculation.proposal import Proposal, ProposalKind
from engine.step.speculation.speculation_policy import (
    Candidate,
    choose_draft_length,
    choose_lengths,
    could_pay,
)
from engine.step.speculation.speculator import Speculator
from engine.step.speculation.step_cost_table import SpeculationCosts, StepCostTable
from engine.step.speculation.turns import SpeculationTurns
from penstock.types import Grammar, GrammarKind, RequestId, SamplingParams


def table(fixed_s: float, token_s: float, sizes: range = range(1, 40)) -> SpeculationCosts:
    costs = SpeculationCosts()
    for size in sizes:
        costs.observe(size, 0, fixed_s + token_s * size)
    return costs


@given(
    others=st.integers(0, 6),
    candidates=st.lists(st.builds(Candidate, st.integers(0, 4), st.floats(0.01, 0.99)), min_size=1, max_size=3),
    token_s=st.floats(0, 0.5),
)
def test_the_chosen_lengths_promise_the_most(others: int, candidates: list[Candidate], token_s: float) -> None:
    costs, count = table(1.0, token_s), others + len(candidates)

    def promise(lengths: tuple[int, ...]) -> float:
        expected = count + sum(
            each.rate ** (place + 1)
            for each, length in zip(candidates, lengths, strict=True)
            for place in range(length)
        )
        return expected / costs.predict(count, sum(lengths))

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
    assert not costs.knows(5), "one measurement may be far off"
    for _ in range(7):
        costs.observe(5, 3.0)
    assert costs.knows(5)
    assert not costs.knows(3)
    costs.observe(5, 1000.0)
    assert costs.predict(5) < 4


def test_slow_first_steps_do_not_bias_the_costs() -> None:
    costs = StepCostTable()
    for seconds in (30.0, 9.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        costs.observe(1, seconds)
    assert costs.predict(1) == 1.0


def test_steps_that_verify_cost_more_than_plain_ones_of_equal_size() -> None:
    costs = table(1.0, 0.0)
    assert costs.predict(16, 8) == 1.0  # nothing has been verified yet
    costs.observe(16, 8, 1.1)
    assert costs.predict(16, 8) == 1.1
    assert costs.predict(16, 2) == pytest.approx(1.025)
    assert costs.predict(17, 8) == 1.1, "as with about as many sequences"
    assert costs.predict(2, 8) == 1.0
    assert costs.predict(16) == 1.0, "plain steps are not dearer for it"
    assert could_pay(16, 8, costs)
    costs.observe(4, 8, 30.0)  # something else held the machine
    assert not could_pay(4, 2, costs)
    assert costs.predict(4, 8) == 4.0
    for _ in range(10_000):
        costs.doubt(4)
    assert could_pay(4, 2, costs), "it is tried again"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FixedProposer:
    """Proposes the right token at the rate `right`, otherwise a wrong one."""

    kind = ProposalKind.LONG_MATCH

    def __init__(self, clock: Clock, right: float) -> None:
        self._clock, self._right, self._asked = clock, right, 0

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        return {sequence: self._propose(count) for sequence, count in counts.items()}

    def _propose(self, count: int) -> Proposal:
        self._asked += 1
        self._clock.now_s += 1e-4
        is_right = self._asked * self._right % 1 + self._right >= 1  # evenly spread
        return Proposal((1 if is_right else 2,) * count, self.kind)

    def forget(self, sequence: Sequence) -> None: ...


class Silent:
    """Never proposes anything."""

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        return {}

    def forget(self, sequence: Sequence) -> None: ...


class FixedDraft(FixedProposer):
    """Proposes at the rate `right`, and takes time for each token."""

    kind = ProposalKind.DRAFT
    reads_states = False

    def __init__(self, clock: Clock, right: float, token_s: float) -> None:
        super().__init__(clock, right)
        self._token_s = token_s
        self.num_drafted = 0
        self.is_full = False

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        self._clock.now_s += self._token_s * max(counts.values())
        self.num_drafted += sum(counts.values())
        return super().propose(counts)

    def predict_s(self, num_sequences: int) -> float | None:
        return self._token_s if self.num_drafted else None

    def has_room(self, sequence: Sequence, count: int) -> bool:
        return not self.is_full

    def is_ready(self, sequence: Sequence) -> bool:
        return True


class FixedHead(FixedDraft):
    """Proposes only after a step that has handed out its hidden states."""

    kind = ProposalKind.EAGLE3
    reads_states = True
    has_states = False

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        return super().propose(counts) if self.has_states else {}

    def is_ready(self, sequence: Sequence) -> bool:
        return self.has_states


def run(
    num_sequences: int,
    right: float,
    fixed_s: float,
    token_s: float,
    num_steps: int = 2000,
    draft_s: float | None = None,
    verify_s: float = 0.0,
    slow_start: float = 1.0,
    after_s: float = 0.0,
    num_after: int = 1,
    taps_s: float | None = None,
) -> tuple[float, int]:
    """Returns the throughput relative to no speculation, and how many tokens were proposed; the text is all ones.

    A step that verifies takes `verify_s` longer than a plain one of as many tokens, and the next step `after_s` longer;
    that excess shrinks evenly over `num_after` plain steps.
    The first three steps take `slow_start` times as long, which is not counted. With `taps_s` the draft is a head, and
    a step that hands out hidden states takes that much longer.
    """
    clock = Clock()
    head = None if taps_s is None or draft_s is None else FixedHead(clock, right, draft_s)
    if head is not None:
        speculator = Speculator(8, clock, lookups=Silent(), draft=head)
    elif draft_s is None:
        speculator = Speculator(8, clock, lookups=FixedProposer(clock, right))
    else:
        speculator = Speculator(8, clock, lookups=Silent(), draft=FixedDraft(clock, right, draft_s))
    sampling = SamplingParams(max_tokens=1 << 30)
    sequences = [Sequence(RequestId(str(n)), [1, 1], 1, sampling, b"") for n in range(num_sequences)]
    num_tokens = num_proposed = 0
    uncounted_s, num_late = 0.0, 0
    for step in range(num_steps):
        began_s, chosen = clock.now_s, {}
        if speculator.may_pay(num_sequences):
            chosen = speculator.propose(sequences, lambda _: 1 << 30, 128)
        count = sum(map(len, chosen.values()))
        taps = head is not None and speculator.wants_states(num_sequences, has_chunks=False)
        clock.now_s += fixed_s + token_s * (num_sequences + count) + (verify_s if count else 0.0)
        clock.now_s += after_s * num_late / num_after
        if head is not None and taps_s is not None:
            clock.now_s += taps_s if taps else 0.0
            head.has_states = taps
        num_late = num_after if count else max(0, num_late - 1)
        if step < 3:
            uncounted_s += (slow_start - 1) * (clock.now_s - began_s)
            clock.now_s += (slow_start - 1) * (clock.now_s - began_s)
        further = 0
        for sequence in sequences:
            proposed = chosen.get(sequence, ())
            held = len(proposed) if proposed and proposed[0] == 1 else 0
            sequence.token_ids += [1] * (1 + held)
            further += held
            if proposed:
                speculator.on_verified(sequence, len(proposed), held)
        speculator.on_step(num_sequences, count, further, clock.now_s - began_s, taps)
        num_tokens += num_sequences + further
        num_proposed += count
    plain_s = num_tokens / num_sequences * (fixed_s + token_s * num_sequences)
    return plain_s / (clock.now_s - uncounted_s), num_proposed


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.01, 0.0005), (0.001, 0.001), (0.0, 0.01)])
def test_speculation_never_slows_decoding(num_sequences: int, right: float, fixed_s: float, token_s: float) -> None:
    """In virtual time, whether or not proposals are right, and whether a step's cost is fixed or grows with its
    tokens."""
    gain, num_proposed = run(num_sequences, right, fixed_s, token_s)
    assert gain > 0.99
    if right == 1.0 and fixed_s > 20 * token_s * num_sequences - 1e-9:
        assert gain > 3
    if fixed_s == 0.0:  # speculation cannot gain; a few attempts measure what wider steps cost
        assert num_proposed < 200


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("verify_s", [0.001, 0.005, 0.05])
def test_costlier_verification_than_predicted_never_slows_decoding(
    num_sequences: int, right: float, verify_s: float
) -> None:
    gain, _ = run(num_sequences, right, 0.01, 0.0001, verify_s=verify_s)
    assert gain > 0.99
    if right == 1.0 and verify_s <= 0.005:
        assert gain > 3


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("right", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("after_s", [0.005, 0.01, 0.02])
@pytest.mark.parametrize("draft_s", [None, 0.001])
def test_slower_steps_after_verification_make_no_loss_look_like_a_gain(
    num_sequences: int, right: float, after_s: float, draft_s: float | None
) -> None:
    """A step after one that verified finds colder caches; plain steps would be faster without speculation."""
    gain, _ = run(num_sequences, right, 0.01, 0.0005, 4000, draft_s, after_s=after_s)
    assert gain > 0.99


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("verify_s", [0.005, 0.01])
def test_plain_steps_that_settle_slowly_make_no_loss_look_like_a_gain(num_sequences: int, verify_s: float) -> None:
    """Only the ninth plain step after one that verified is as fast as without speculation."""
    gain, _ = run(num_sequences, 0.5, 0.005, 0.0005, 6000, verify_s=verify_s, after_s=0.006, num_after=8)
    assert gain > 0.99


def test_a_speculator_that_cannot_gain_looks_at_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying is so dear that no proposal could pay, though the account is open. What it computes after each of these
    steps would be a visible part of short ones."""
    num_looked = 0
    on_steps = SpeculationTurns.on_steps

    def count(turns: SpeculationTurns, num_sequences: int, num_steps: int, plain_s: float, *, measured: bool) -> None:
        nonlocal num_looked
        num_looked += 1
        on_steps(turns, num_sequences, num_steps, plain_s, measured=measured)

    speculator = Speculator(8, Clock(), lookups=Silent())
    while not speculator.may_pay(1):
        speculator.on_step(1, 0, 0, 0.01)
    speculator.on_step(1, 2, 0, 0.04)
    while speculator.may_pay(1):
        speculator.on_step(1, 0, 0, 0.01)
    monkeypatch.setattr(SpeculationTurns, "on_steps", count)
    for _ in range(1600):
        assert not speculator.may_pay(1)
        speculator.on_step(1, 0, 0, 0.01)
    assert 0 < num_looked <= 200


def test_the_first_plain_step_may_come_after_verification() -> None:
    """`always` verifies before any plain step was measured."""
    speculator = Speculator(8, Clock(), always=True, lookups=Silent())
    speculator.on_step(1, 8, 8, 0.02)
    for _ in range(20):
        speculator.on_step(1, 0, 0, 0.01)
    speculator.on_step(2, 0, 0, 0.01)


def test_plain_steps_that_have_become_faster_end_speculation() -> None:
    """Each step that verifies yields nine tokens, which pays only while plain steps are slow."""
    speculator = Speculator(8, Clock(), lookups=Silent())

    def count_verifying(num_steps: int, plain_s: float) -> int:
        count, num_settling = 0, 0
        for _ in range(num_steps):
            if speculator.may_pay(1):
                count, num_settling = count + 1, 8
                speculator.on_step(1, 8, 8, 0.02)
            else:
                speculator.on_step(1, 0, 0, 0.01 if num_settling else plain_s)
                num_settling = max(0, num_settling - 1)
        return count

    assert count_verifying(1000, 0.01) > 500
    count_verifying(1000, 0.002)
    assert count_verifying(10_000, 0.002) < 100


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("draft_s", [None, 0.001, 0.01])
@pytest.mark.parametrize("verify_s", [0.0, 0.01])
def test_probing_costs_half_a_percent_at_most(num_sequences: int, draft_s: float | None, verify_s: float) -> None:
    gain, _ = run(num_sequences, 0.0, 0.01, 0.0005, 20_000, draft_s, verify_s)
    assert gain > 0.995


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("right", [0.0, 0.5])
def test_a_slow_start_makes_no_loss_look_like_a_gain(num_sequences: int, right: float) -> None:
    """The first steps of a process are slow, and plain steps soon become rare."""
    gain, _ = run(num_sequences, right, 0.01, 0.003, draft_s=0.001, slow_start=5.0)
    assert gain > 0.99


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("draft_s", [0.001, 0.01])
def test_a_draft_model_never_slows_decoding(num_sequences: int, right: float, draft_s: float) -> None:
    """A step takes ten milliseconds; a drafted token takes one, which may pay, or ten, which cannot."""
    gain, _ = run(num_sequences, right, 0.01, 0.0001, 6000, draft_s)
    assert gain > 0.99
    if right == 1.0 and draft_s == 0.001:
        assert gain > 2


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("draft_s", [0.0005, 0.01])
@pytest.mark.parametrize("taps_s", [0.0005, 0.003])
def test_hidden_states_never_slow_decoding(num_sequences: int, right: float, draft_s: float, taps_s: float) -> None:
    """Handing them out takes 5 or 30 % of a step of ten milliseconds."""
    gain, _ = run(num_sequences, right, 0.01, 0.0001, 6000, draft_s, taps_s=taps_s)
    assert gain > 0.99
    if right == 1.0 and draft_s == 0.0005:
        assert gain > 2


@given(
    num_others=st.integers(0, 9),
    rates=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4),
    token_s=st.floats(0, 0.5),
    draft_s=st.floats(0, 1),
)
def test_the_chosen_number_of_drafted_tokens_promises_the_most(
    num_others: int, rates: list[float], token_s: float, draft_s: float
) -> None:
    costs, count = table(1.0, token_s, range(1, 60)), num_others + len(rates)

    def promise(length: int) -> float:
        expected = count + sum(rate ** (place + 1) for rate in rates for place in range(length))
        return expected / (costs.predict(count, length * len(rates)) + length * draft_s)

    chosen = choose_draft_length(count, rates, 8, costs, draft_s)
    best = max(range(9), key=promise)
    if promise(best) > 1.05 * promise(0) + 1e-9:
        assert promise(chosen) == pytest.approx(promise(best), rel=1e-9)
    elif promise(best) < 1.05 * promise(0) - 1e-9:
        assert chosen == 0


@given(
    num_sequences=st.integers(1, 20),
    token_s=st.floats(0, 1),
    fixed_s=st.floats(0.001, 1),
    rate=st.floats(0.01, 0.9),
    num_candidates=st.integers(1, 20),
)
def test_the_shortcut_misses_nothing_that_pays(
    num_sequences: int, token_s: float, fixed_s: float, rate: float, num_candidates: int
) -> None:
    """If a step's cost is linear, the most is gained either with all sequences or with one of them."""
    costs = table(fixed_s, token_s, range(1, 20 * 9 + 1))
    candidates = [Candidate(8, rate)] * min(num_candidates, num_sequences)
    if any(choose_lengths(num_sequences, candidates, costs)):
        assert could_pay(num_sequences, 8, costs)


def test_drafts_are_retried_while_steps_run_ahead() -> None:
    """A run-ahead step is scheduled only if `would_propose` finds nothing; `propose` is then not called."""
    clock = Clock()
    draft = FixedDraft(clock, 0.0, 0.001)  # twos
    speculator = Speculator(8, clock, lookups=Silent(), draft=draft)
    sequence = Sequence(RequestId("r"), [1, 1], 1, SamplingParams(max_tokens=1 << 30), b"")
    num_proposed = {1: 0, 2: 0}
    for step in range(4000):
        said = 1 if step < 2000 else 2
        began_s, proposed = clock.now_s, ()
        if speculator.may_pay(1) and speculator.would_propose([sequence], lambda _: 1 << 30):
            proposed = speculator.propose([sequence], lambda _: 1 << 30, 128).get(sequence, ())
        clock.now_s += 0.01
        held = len(proposed) if said == 2 else 0
        sequence.token_ids += [said] * (1 + held)
        if proposed:
            num_proposed[said] += len(proposed)
            speculator.on_verified(sequence, len(proposed), held)
        speculator.on_step(1, len(proposed), held, clock.now_s - began_s)
    assert num_proposed[2] > 1000 > num_proposed[1]


def test_steps_run_ahead_if_the_draft_has_no_room() -> None:
    clock = Clock()
    draft = FixedDraft(clock, 1.0, 0.0)
    draft.is_full = True
    speculator = Speculator(8, clock, always=True, lookups=Silent(), draft=draft)
    sequence = Sequence(RequestId("r"), [1, 1], 1, SamplingParams(max_tokens=1 << 30), b"")
    assert not speculator.would_propose([sequence], lambda _: 9)
    assert speculator.propose([sequence], lambda _: 9, 128) == {}
    assert draft.num_drafted == 0
    draft.is_full = False
    assert speculator.would_propose([sequence], lambda _: 9)
    assert not speculator.would_propose([sequence], lambda _: 1), "it ends with the next token"


def test_sequences_with_grammars_or_without_output_get_no_proposals() -> None:
    clock = Clock()
    speculator = Speculator(4, clock, always=True, lookups=FixedProposer(clock, 1.0))
    plain = Sequence(RequestId("plain"), [1, 1], 1, SamplingParams(max_tokens=9), b"")
    ruled = SamplingParams(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, "a*"))
    others = [
        Sequence(RequestId("ruled"), [1, 1], 1, ruled, b""),
        Sequence(RequestId("first"), [1, 1], 2, SamplingParams(max_tokens=9), b""),
    ]
    lefts = {plain: 3, others[0]: 9, others[1]: 9}
    # The step samples one more token.
    assert speculator.propose([plain, *others], lefts.__getitem__, 100) == {plain: (1, 1)}
    assert speculator.propose([plain], lambda _: 1, 100) == {}
    assert speculator.propose([plain], lambda _: 9, 1) == {plain: (1,)}
