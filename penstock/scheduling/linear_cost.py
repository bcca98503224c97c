"""Learns online how seconds depend linearly on quantities: the regression behind every learned cost. Pure.

Routers learn the costs of steps and links from workers' reports, decode workers those of their own steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_FORGETTING = 0.95  # halves an observation's weight after 13 more
_VARIANCE = 25.0  # initial variance of a coefficient, relative to its prior
_NOISE_VARIANCE = 0.05  # variance of a measured time, relative to the predicted one
_MAX_OBSERVED = 1e6  # measurements are capped at this multiple of the prediction
_MAX_RATIO = 1e4  # largest ratio of a coefficient to its prior
_OUTLIER = 3.0  # errors beyond this many mean deviations count less and less
_MAX_STEP = 4.0  # the most by which one observation multiplies a coefficient
_MIN_DEVIATION = 0.1
_MAX_DEVIATION = 10.0
_SMOOTHING = 0.1


class LinearCost:
    """Predicts seconds as a sum of quantities times coefficients, which stay within [0, 1e4 * prior] and are never NaN.

    Uses recursive least squares (Haykin, Adaptive Filter Theory, ch. 10) over ratios: quantities are scaled such that
    each prior and the predicted time are 1, so that a late step counts the same on slow and fast workers.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        assert all(value > 0 for value in prior), prior
        self._prior = tuple(prior)
        self._ratios = [1.0] * len(prior)
        self._covariance = _prior_covariance(len(prior))
        self._deviation = 1.0  # running mean of the error, relative to the prediction
        self.num_observed = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(ratio * prior for ratio, prior in zip(self._ratios, self._prior, strict=True))

    def predict(self, quantities: Sequence[float]) -> float:
        return _dot(self.coefficients, quantities)

    def observe(self, quantities: Sequence[float], seconds: float) -> None:
        """Learns from one measurement; ignores impossible ones."""
        for value in (seconds, *quantities):
            if not 0 <= value < math.inf:
                return
        prior = self._prior
        # The floor keeps ratios finite where the model has learned that something is free.
        predicted_s = max(self.predict(quantities), 1e-4 * _dot(prior, quantities))
        if predicted_s <= 0.0:
            return
        row = [quantity * value / predicted_s for quantity, value in zip(quantities, prior, strict=True)]
        # A figure beyond the maximum is wrong in any case, and an infinite ratio would spoil all later estimates.
        observed = seconds / predicted_s if seconds < _MAX_OBSERVED * predicted_s else _MAX_OBSERVED
        error = observed - _dot(row, self._ratios)
        limit = _OUTLIER * self._deviation
        self._deviation += _SMOOTHING * (min(abs(error), 2 * limit) - self._deviation)
        self._deviation = min(max(self._deviation, _MIN_DEVIATION), _MAX_DEVIATION)
        self._update(row, error, _NOISE_VARIANCE * max(1.0, abs(error) / limit))
        self.num_observed += 1

    def _update(self, row: list[float], error: float, noise: float) -> None:
        """Updates the coefficients in plain loops, because a router does this for every load report of every worker."""
        covariance = self._covariance
        spread = [_dot(line, row) for line in covariance]
        scale = noise + _dot(row, spread)
        is_cut, ratios = False, []
        for ratio, moved in zip(self._ratios, spread, strict=True):
            wanted = ratio + moved / scale * error
            limit = _MAX_STEP * ratio
            limit = (1.0 if limit < 1.0 else limit) if limit < _MAX_RATIO else _MAX_RATIO
            is_cut = is_cut or wanted > limit
            ratios.append(min(wanted if wanted > 0.0 else 0.0, limit))
        self._ratios = ratios
        if is_cut:
            return  # the step was cut, so the next observation may move as far again
        for i, line in enumerate(covariance):
            at_i = spread[i]
            for j in range(i + 1):
                line[j] = covariance[j][i] = line[j] - at_i * spread[j] / scale
        variances = [line[i] for i, line in enumerate(covariance)]
        # Forgetting without new information would let the covariance grow without bound, so the prior's is the limit.
        if max(variances) < _VARIANCE * _FORGETTING:
            self._covariance = [[value / _FORGETTING for value in line] for line in covariance]
        if min(variances) < 0:  # rounding error
            self._covariance = _prior_covariance(len(row))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total = 0.0
    for one, other in zip(left, right, strict=True):
        total += one * other
    return total


def _prior_covariance(size: int) -> list[list[float]]:
    return [[_VARIANCE if row == column else 0.0 for column in range(size)] for row in range(size)]


def positive(coefficients: Iterable[float], prior: Iterable[float]) -> tuple[float, ...]:
    """Keeps every coefficient above zero for use as a prior: a prior of zero could never be learned."""
    return tuple(max(value, start / 1e3) for value, start in zip(coefficients, prior, strict=True))
