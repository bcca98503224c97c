"""Decides how many tokens to draft and how many proposed tokens a step verifies, so as to raise the expected tokens per
second. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from engine.step.speculation.step_cost_table import SpeculationCosts

_LEAST_GAIN = 1.05  # least gain in expected tokens per second; a smaller one is within the prediction's error
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
