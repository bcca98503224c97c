"""Learns seconds as a linear function of quantities while it is used: the regression under every learned cost. Pure.

Routers learn what steps and links cost from workers' reports by it, decode workers what their own steps cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_FORGETTING = 0.95  # an observation counts half after 13 more
_VARIANCE = 25.0  # of a coefficient over its prior's, before anything is learned
_NOISE_VARIANCE = 0.05  # of a measured time over the predicted one
_MAX_OBSERVED = 1e6  # times the prediction: measurements are cut off there
_MAX_RATIO = 1e4  # of a coefficient to its prior
_OUTLIER = 3.0  # mean deviations; the further an error lies beyond them, the less it counts
_MAX_STEP = 4.0  # times a coefficient: the most by which one observation raises it
_MIN_DEVIATION = 0.1
_MAX_DEVIATION = 10.0
_SMOOTHING = 0.1


class LinearCost:
    """Seconds as a sum of quantities times coefficients, which stay within [0, 1e4 * prior] and are never NaN.

    Recursive least squares (Haykin, Adaptive Filter Theory, ch. 10) over ratios: quantities are scaled so that each
    prior is 1 and the predicted time is 1, so that a late step counts the same on a slow worker as on a fast one.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        assert all(value > 0 for value in prior), prior
        size = range(len(prior))
        self._prior = tuple(prior)
        self._ratios = [1.0] * len(prior)
        self._covariance = [[_VARIANCE if row == column else 0.0 for column in size] for row in size]
        self._deviation = 1.0  # running mean of the error over the prediction
        self.num_observed = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(ratio * prior for ratio, prior in zip(self._ratios, self._prior, strict=True))

    def predict(self, quantities: Sequence[float]) -> float:
        return sum(value * quantity for value, quantity in zip(self.coefficients, quantities, strict=True))

    def observe(self, quantities: Sequence[float], seconds: float) -> None:
        """Learns from one measurement; ignores impossible ones."""
        measured = (seconds, *quantities)
        if not all(math.isfinite(value) and value >= 0 for value in measured):
            return
        predicted_s = max(self.predict(quantities), _floor_s(self._prior, quantities))
        if predicted_s <= 0.0:
            return
        row = [quantity * prior / predicted_s for quantity, prior in zip(quantities, self._prior, strict=True)]
        # A figure beyond the maximum is false, whatever it is, and an infinite ratio would spoil all that follows.
        observed = seconds / predicted_s if seconds < _MAX_OBSERVED * predicted_s else _MAX_OBSERVED
        error = observed - sum(value * ratio for value, ratio in zip(row, self._ratios, strict=True))
        limit = _OUTLIER * self._deviation
        self._deviation += _SMOOTHING * (min(abs(error), 2 * limit) - self._deviation)
        self._deviation = min(max(self._deviation, _MIN_DEVIATION), _MAX_DEVIATION)
        self._update(row, error, _NOISE_VARIANCE * max(1.0, abs(error) / limit))
        self.num_observed += 1

    def _update(self, row: list[float], error: float, noise: float) -> None:
        covariance = self._covariance
        size = range(len(row))
        spread = [sum(covariance[i][j] * row[j] for j in size) for i in size]
        scale = noise + sum(row[i] * spread[i] for i in size)
        wanted = [self._ratios[i] + spread[i] / scale * error for i in size]
        limits = [min(_MAX_STEP * max(ratio, 1 / _MAX_STEP), _MAX_RATIO) for ratio in self._ratios]
        self._ratios = [min(max(ratio, 0.0), limit) for ratio, limit in zip(wanted, limits, strict=True)]
        if any(ratio > limit for ratio, limit in zip(wanted, limits, strict=True)):
            return  # not learned in full: the next observation may move the coefficients as far again
        for i in size:
            for j in range(i + 1):
                value = covariance[i][j] - spread[i] * spread[j] / scale
                covariance[i][j] = covariance[j][i] = value
        # Forgetting without news would let the covariance grow without bound: the prior's is the limit.
        if max(covariance[i][i] for i in size) < _VARIANCE * _FORGETTING:
            self._covariance = [[value / _FORGETTING for value in line] for line in covariance]
        if any(self._covariance[i][i] < 0 for i in size):  # rounding
            self._covariance = [[_VARIANCE if i == j else 0.0 for j in size] for i in size]


def _floor_s(prior: Sequence[float], quantities: Sequence[float]) -> float:
    """Keeps ratios finite where the model has learned that something is free."""
    return 1e-4 * sum(value * quantity for value, quantity in zip(prior, quantities, strict=True))


def positive(coefficients: Iterable[float], prior: Iterable[float]) -> tuple[float, ...]:
    """Keeps a prior from calling something free: its coefficient could never be learned then."""
    return tuple(max(value, start / 1e3) for value, start in zip(coefficients, prior, strict=True))
