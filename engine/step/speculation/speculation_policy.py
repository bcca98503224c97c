"""Decides how many tokens to draft and how many proposed tokens a step verifies, so as to raise the expected tokens per
second. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from engine.step.speculation.step_cost_table import SpeculationCosts

_LEAST_GAIN = 1.05  # least gain in expected tokens per second; a smaller one is within the prediction's error
_ALLOWANCE = 0.004  # share of the time that failed attempts may cost
_FIRST_CREDIT_STEPS = 8.0  # in plain steps: what may be lost before anything was gained
_MAX_CREDIT_STEPS = 32.0  # in plain steps: the gains that may be lost again
_HOPEFUL_RATE = 0.95  # if no proposal would pay even at this rate, nothing is proposed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence's proposal: its length, and the probability that a token holds if those before it do."""

    num_tokens: int
    rate: float


def could_pay(num_sequences: int, num_tokens: int, costs: SpeculationCosts) -> bool:
    """Returns whether a step of `num_sequences` would gain by verifying up to `num_tokens` for each of them, or for one
    of them, if these nearly always held. Costs the same for any number of sequences.
    """
    least = _LEAST_GAIN * num_sequences / costs.predict(num_sequences)
    held = 0.0
    for count in range(1, num_tokens + 1):
        held += _HOPEFUL_RATE**count
        for share in (num_sequences, 1):
            if (num_sequences + share * held) / costs.predict(num_sequences, share * count) > least:
                return True
    return False


def choose_draft_length(
    num_sequences: int, rates: Sequence[float], num_tokens: int, costs: SpeculationCosts, draft_s: float
) -> int:
    """Returns how many tokens to draft for each of `rates`, the sequences of a step of `num_sequences` that have no
    proposal; a rate is the probability that a drafted token holds if those before it do.

    Each token takes `draft_s` seconds of drafting, for all of them together, before the step begins.
    """
    best, best_rate = 0, _LEAST_GAIN * num_sequences / costs.predict(num_sequences)
    expected, powers = float(num_sequences), list(rates)
    for count in range(1, num_tokens + 1):
        expected += sum(powers)
        powers = [power * rate for power, rate in zip(powers, rates, strict=True)]
        seconds = costs.predict(num_sequences, count * len(rates)) + count * draft_s
        if expected / seconds > best_rate:
            best, best_rate = count, expected / seconds
    return best


def choose_lengths(num_sequences: int, candidates: Sequence[Candidate], costs: SpeculationCosts) -> list[int]:
    """Returns how many tokens of each candidate are verified in a step of `num_sequences`.

    The likeliest tokens come first, and the best number of them is taken.
    """
    lengths = [0] * len(candidates)
    queue = [(-each.rate, place) for place, each in enumerate(candidates) if each.num_tokens]
    heapq.heapify(queue)
    expected, taken = float(num_sequences), 0
    best_rate = _LEAST_GAIN * num_sequences / costs.predict(num_sequences)
    order: list[int] = []
    best = 0
    while queue:
        probability, place = heapq.heappop(queue)
        order.append(place)
        expected, taken = expected - probability, taken + 1
        lengths[place] += 1
        if lengths[place] < candidates[place].num_tokens:
            heapq.heappush(queue, (probability * candidates[place].rate, place))
        if (rate := expected / costs.predict(num_sequences, taken)) > best_rate:
            best_rate, best = rate, taken
    for place in order[best:]:
        lengths[place] -= 1
    return lengths


class SpeculationLedger:
    """Keeps account of the seconds that speculation has saved and cost, so that it cannot cost more than a small share
    of the time even if predictions are wrong.
    """

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._has_begun = False

    @property
    def is_open(self) -> bool:
        """Returns whether speculation may be tried."""
        return self._has_begun and self._credit_s > 0

    def on_steps(self, num_steps: int, plain_s: float) -> None:
        """Records that steps have ended; `plain_s` is the time of a step with as many sequences and one token each."""
        if not self._has_begun:
            self._has_begun, self._credit_s = True, _FIRST_CREDIT_STEPS * plain_s
        self.add(_ALLOWANCE * num_steps * plain_s, plain_s)

    def on_verified(self, cost_s: float, num_plain: float, plain_s: float) -> None:
        """Records a step that has verified proposals, and whose tokens would have taken `num_plain` steps of `plain_s`.

        `cost_s` is the mean time of such a step, not the time of this one: both sides are means of the same kind, so
        other load on the machine counts as neither gain nor loss.
        """
        self.add(num_plain * plain_s - cost_s, plain_s)

    def add(self, gain_s: float, plain_s: float) -> None:
        """Records seconds that were gained, or lost if negative."""
        self._credit_s = min(self._credit_s + gain_s, _MAX_CREDIT_STEPS * plain_s)
