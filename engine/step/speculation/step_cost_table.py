"""Learns what a step costs by the number of tokens that it computes, from steps without chunks of prompts. Pure."""

from __future__ import annotations

import bisect

_SMOOTHING = 0.1  # weight of the newest measurement
_OUTLIER = 3.0  # times the known cost: a longer step counts as this, since something else took the machine
_ASSUMED_SLOPE = 0.02  # share of a step by which one more token is assumed to lengthen it, until two sizes are known


class StepCostTable:
    """Owns a running mean for each number of tokens. Between those, costs are interpolated; beyond them, each token
    lengthens a step as much as among them, and at most by its proportional share.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []  # ascending
        self._seconds: list[float] = []

    @property
    def is_empty(self) -> bool:
        return not self._tokens

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        place = bisect.bisect_left(self._tokens, num_tokens)
        if place < len(self._tokens) and self._tokens[place] == num_tokens:
            mean_s = self._seconds[place]
            self._seconds[place] += (min(elapsed_s, _OUTLIER * mean_s) - mean_s) * _SMOOTHING
        else:
            self._tokens.insert(place, num_tokens)
            self._seconds.insert(place, elapsed_s)

    def knows(self, num_tokens: int) -> bool:
        """Whether a step of exactly so many tokens has been measured."""
        place = bisect.bisect_left(self._tokens, num_tokens)
        return place < len(self._tokens) and self._tokens[place] == num_tokens

    def predict(self, num_tokens: int) -> float:
        """Returns seconds; at least one step must have been measured."""
        tokens, seconds = self._tokens, self._seconds
        place = bisect.bisect_left(tokens, num_tokens)
        if place == len(tokens):
            return seconds[-1] + self._slope() * (num_tokens - tokens[-1])
        if place == 0 or tokens[place] == num_tokens:
            return seconds[place]
        share = (num_tokens - tokens[place - 1]) / (tokens[place] - tokens[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def _slope(self) -> float:
        tokens, seconds = self._tokens, self._seconds
        share = seconds[-1] / tokens[-1]
        if len(tokens) < 2:
            return min(share, _ASSUMED_SLOPE * seconds[-1])
        return min(share, max(0.0, (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0])))
