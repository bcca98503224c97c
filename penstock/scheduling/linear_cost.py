"""Learns online, by linear regression, how many seconds work takes: the base of every learned cost. Pure.

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
        present = [(place, value) for place, value in enumerate(row) if value]  # the rest adds nothing to any sum
        spread = []
        for line in covariance:
            total = 0.0
            for place, value in present:
                total += line[place] * value
            spread.append(total)
        total = 0.0
        for place, value in present:
            total += value * spread[place]
        scale = noise + total
        wanted = [ratio + moved / scale * error for ratio, moved in zip(self._ratios, spread, strict=True)]
        covariance = [
            [value - here * there / scale for value, there in zip(line, spread, strict=True)]
            for line, here in zip(covariance, spread, strict=True)
        ]
        if min(wanted) < 0.0:
            wanted = _without_negatives(wanted, covariance)
        steps = [_step(ratio, value) for ratio, value in zip(self._ratios, wanted, strict=True)]
        self._ratios = [ratio for ratio, _ in steps]
        if any(is_cut for _, is_cut in steps):
            return  # the step was cut, so the next observation may move as far again
        self._covariance = covariance
        variances = [line[i] for i, line in enumerate(covariance)]
        # Forgetting without new information would let the covariance grow without bound, so the prior's is the limit.
        if max(variances) < _VARIANCE * _FORGETTING:
            self._covariance = [[value / _FORGETTING for value in line] for line in covariance]
        if min(variances) < 0:  # rounding error
            self._covariance = _prior_covariance(len(row))


class ThreeTermCost(LinearCost):
    """A `LinearCost` of three quantities with the same results, bit for bit, and several times as fast.

    A router learns from every load report of every worker, so the loops over quantities are written out here.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        super().__init__(prior)
        self._p0, self._p1, self._p2 = self._prior
        self._c0, self._c1, self._c2 = self._prior  # the coefficients
        self._r0 = self._r1 = self._r2 = 1.0  # their ratios to the prior
        self._v00 = self._v11 = self._v22 = _VARIANCE  # the covariance, which is symmetric
        self._v10 = self._v20 = self._v21 = 0.0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return self._c0, self._c1, self._c2

    def predict(self, quantities: Sequence[float]) -> float:
        q0, q1, q2 = quantities
        return self._c0 * q0 + self._c1 * q1 + self._c2 * q2

    def observe(self, quantities: Sequence[float], seconds: float) -> None:
        """Learns from one measurement; ignores impossible ones."""
        q0, q1, q2 = quantities
        if not (0 <= seconds < math.inf and 0 <= q0 < math.inf and 0 <= q1 < math.inf and 0 <= q2 < math.inf):
            return
        x0, x1, x2 = q0 * self._p0, q1 * self._p1, q2 * self._p2
        predicted_s, floor_s = self._c0 * q0 + self._c1 * q1 + self._c2 * q2, 1e-4 * (x0 + x1 + x2)
        predicted_s = predicted_s if predicted_s > floor_s else floor_s
        if predicted_s <= 0.0:
            return
        x0, x1, x2 = x0 / predicted_s, x1 / predicted_s, x2 / predicted_s
        observed = seconds / predicted_s if seconds < _MAX_OBSERVED * predicted_s else _MAX_OBSERVED
        error = observed - (x0 * self._r0 + x1 * self._r1 + x2 * self._r2)
        limit, size = _OUTLIER * self._deviation, abs(error)
        deviation = self._deviation + _SMOOTHING * ((size if size < 2 * limit else 2 * limit) - self._deviation)
        deviation = deviation if deviation > _MIN_DEVIATION else _MIN_DEVIATION
        self._deviation = deviation if deviation < _MAX_DEVIATION else _MAX_DEVIATION
        excess = size / limit
        self._learn(x0, x1, x2, error, _NOISE_VARIANCE * (excess if excess > 1.0 else 1.0))
        self.num_observed += 1

    def _learn(self, x0: float, x1: float, x2: float, error: float, noise: float) -> None:
        """Does what `_update` does."""
        s0 = self._v00 * x0 + self._v10 * x1 + self._v20 * x2
        s1 = self._v10 * x0 + self._v11 * x1 + self._v21 * x2
        s2 = self._v20 * x0 + self._v21 * x1 + self._v22 * x2
        scale = noise + (x0 * s0 + x1 * s1 + x2 * s2)
        w0, w1, w2 = self._r0 + s0 / scale * error, self._r1 + s1 / scale * error, self._r2 + s2 / scale * error
        v00, v10, v11 = self._v00 - s0 * s0 / scale, self._v10 - s1 * s0 / scale, self._v11 - s1 * s1 / scale
        v20, v21, v22 = self._v20 - s2 * s0 / scale, self._v21 - s2 * s1 / scale, self._v22 - s2 * s2 / scale
        if w0 < 0.0 or w1 < 0.0 or w2 < 0.0:
            w0, w1, w2 = _without_negatives([w0, w1, w2], [[v00, v10, v20], [v10, v11, v21], [v20, v21, v22]])
        (r0, cut0), (r1, cut1), (r2, cut2) = _step(self._r0, w0), _step(self._r1, w1), _step(self._r2, w2)
        self._r0, self._r1, self._r2 = r0, r1, r2
        self._c0, self._c1, self._c2 = r0 * self._p0, r1 * self._p1, r2 * self._p2
        if cut0 or cut1 or cut2:
            return
        if min(v00, v11, v22) < 0:  # rounding error
            v00 = v11 = v22 = _VARIANCE
            v10 = v20 = v21 = 0.0
        elif max(v00, v11, v22) < _VARIANCE * _FORGETTING:
            v00, v10, v11 = v00 / _FORGETTING, v10 / _FORGETTING, v11 / _FORGETTING
            v20, v21, v22 = v20 / _FORGETTING, v21 / _FORGETTING, v22 / _FORGETTING
        self._v00, self._v10, self._v11, self._v20, self._v21, self._v22 = v00, v10, v11, v20, v21, v22


def _without_negatives(wanted: list[float], covariance: list[list[float]]) -> list[float]:
    """Returns the ratios that `wanted` becomes if those below zero are known to be zero.

    Raising them alone would leave the others at values that only fit together with a negative one.
    """
    wanted, covariance = list(wanted), [list(line) for line in covariance]
    for _ in wanted:
        place = min(range(len(wanted)), key=wanted.__getitem__)
        value, variance = wanted[place], covariance[place][place]
        if value >= 0.0 or variance <= 0.0:
            break
        column = [line[place] / variance for line in covariance]
        wanted = [each - share * value for each, share in zip(wanted, column, strict=True)]
        line = covariance[place]
        covariance = [
            [each - share * there for each, there in zip(row, line, strict=True)]
            for row, share in zip(covariance, column, strict=True)
        ]
        wanted[place] = 0.0
    return wanted


def _step(ratio: float, wanted: float) -> tuple[float, bool]:
    """Returns the new ratio of a coefficient to its prior, and whether the step to it was cut."""
    limit = _MAX_STEP * ratio
    limit = (1.0 if limit < 1.0 else limit) if limit < _MAX_RATIO else _MAX_RATIO
    if wanted > limit:
        return limit, True
    return (wanted if wanted > 0.0 else 0.0), False


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total = 0.0
    for left_value, right_value in zip(left, right, strict=True):
        total += left_value * right_value
    return total


def _prior_covariance(size: int) -> list[list[float]]:
    return [[_VARIANCE if row == column else 0.0 for column in range(size)] for row in range(size)]


def positive(coefficients: Iterable[float], prior: Iterable[float]) -> tuple[float, ...]:
    """Keeps every coefficient above zero for use as a prior: a prior of zero could never be learned."""
    return tuple(max(value, start / 1e3) for value, start in zip(coefficients, prior, strict=True))
