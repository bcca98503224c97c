"""What a step costs on each worker, learnt while it serves. Pure: no clock, no I/O.

A step takes a fixed time, a time for each token that it computes, and a time for each token of context that each of
these attends to. Prefill and decode steps have such a model each, because a GPU runs them at different limits. Models
start from the median of the fleet's, and follow the totals that workers report by recursive least squares that forgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.types import StepTotals, WorkerId, WorkerLoad

_FORGETTING = 0.95  # an observation counts half after 13 more
_VARIANCE = 25.0  # of a coefficient over its prior's, before anything is known
_NOISE_VARIANCE = 0.05  # of a measured time over the predicted one
_MAX_TOLD = 1e6  # times what was predicted
_MAX_RATIO = 1e4  # of a coefficient to its prior
_OUTLIER = 3.0  # mean deviations; what lies beyond counts the less, the further it is
_MAX_STEP = 4.0  # times a coefficient, that one observation may raise it
_MIN_DEVIATION = 0.1
_MAX_DEVIATION = 10.0
_SMOOTHING = 0.1
_MIN_OBSERVED_S = 0.02  # of steps in one observation


class LinearCost:
    """Seconds as a sum of quantities times coefficients. Coefficients stay within [0, 1e4 * prior], never NaN.

    Recursive least squares (Haykin, Adaptive Filter Theory, ch. 10) over ratios: quantities are scaled so that each
    prior is 1 and the predicted time is 1, and hence a late step of a slow worker weighs what one of a fast one does.
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
        return sum(one * value for one, value in zip(self.coefficients, quantities, strict=True))

    def observe(self, quantities: Sequence[float], seconds: float) -> None:
        """Learns from one measurement; ignores one that cannot be."""
        if not (math.isfinite(seconds) and seconds >= 0 and all(math.isfinite(one) and one >= 0 for one in quantities)):
            return
        predicted_s = max(self.predict(quantities), _floor_s(self._prior, quantities))
        if predicted_s <= 0.0:
            return
        row = [one * prior / predicted_s for one, prior in zip(quantities, self._prior, strict=True)]
        # Beyond that it is a liar's figure, whatever it is; and what is infinite spoils all that follows.
        told = seconds / predicted_s if seconds < _MAX_TOLD * predicted_s else _MAX_TOLD
        error = told - sum(a * b for a, b in zip(row, self._ratios, strict=True))
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
        self._ratios = [min(max(one, 0.0), limit) for one, limit in zip(wanted, limits, strict=True)]
        if any(one > limit for one, limit in zip(wanted, limits, strict=True)):
            return  # not learnt yet: the next observation may move it as far again
        for i in size:
            for j in range(i + 1):
                value = covariance[i][j] - spread[i] * spread[j] / scale
                covariance[i][j] = covariance[j][i] = value
        # Forgetting where nothing new is learnt would let the covariance grow without bound: the prior's is the limit.
        if max(covariance[i][i] for i in size) < _VARIANCE * _FORGETTING:
            self._covariance = [[value / _FORGETTING for value in line] for line in covariance]
        if any(self._covariance[i][i] < 0 for i in size):  # rounding
            self._covariance = [[_VARIANCE if i == j else 0.0 for j in size] for i in size]


def _floor_s(prior: Sequence[float], quantities: Sequence[float]) -> float:
    """Keeps ratios finite where the model has come to think that something is free."""
    return 1e-4 * sum(one * value for one, value in zip(prior, quantities, strict=True))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step: seconds."""

    fixed_s: float
    token_s: float  # for each token computed
    context_s: float  # for each token computed and token before it

    def prefill_s(self, num_tokens: float, context: float, chunk_tokens: int) -> float:
        """To compute the last `num_tokens` of `context` tokens, in chunks."""
        steps = -(-num_tokens // chunk_tokens)
        return steps * self.fixed_s + num_tokens * (self.token_s + self.context_s * (context - num_tokens / 2))


PREFILL_PRIOR = StepCost(fixed_s=0.005, token_s=5e-4, context_s=1e-8)
DECODE_PRIOR = StepCost(fixed_s=0.015, token_s=1e-4, context_s=1e-7)


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """One worker's models at one moment."""

    prefill: StepCost = PREFILL_PRIOR
    decode: StepCost = DECODE_PRIOR
    queued_token_s: float = PREFILL_PRIOR.token_s  # of prompts waiting, whatever their context


PRIOR_COSTS = WorkerCosts()


@dataclass(slots=True)
class _Model:
    linear: LinearCost
    seen: StepTotals = field(default_factory=StepTotals)

    def observe(self, totals: StepTotals) -> StepTotals | None:
        """Learns from what has come since the last report; None where that is too little."""
        if totals.steps < self.seen.steps:  # another incarnation
            self.seen = StepTotals()
        since = totals.since(self.seen)
        if since.seconds < _MIN_OBSERVED_S or since.steps == 0:
            return None
        self.seen = totals
        self.linear.observe((since.steps, since.tokens, since.contexts), since.seconds)
        return since

    @property
    def cost(self) -> StepCost:
        return StepCost(*self.linear.coefficients)


class _WorkerModels:
    def __init__(self, prior: WorkerCosts) -> None:
        self.prefill = _Model(LinearCost(_positive(prior.prefill, PREFILL_PRIOR)))
        self.decode = _Model(LinearCost(_positive(prior.decode, DECODE_PRIOR)))
        self.queued_token_s = prior.queued_token_s
        self.costs = prior

    def refresh(self) -> None:
        self.costs = WorkerCosts(self.prefill.cost, self.decode.cost, self.queued_token_s)


class CostBook:
    """The models of every worker. A new worker's start from the median of its peers', which one liar does not move."""

    def __init__(self) -> None:
        self._models: dict[WorkerId, _WorkerModels] = {}

    def costs(self, worker_id: WorkerId) -> WorkerCosts:
        """The same object until something is learnt."""
        models = self._models.get(worker_id)
        return models.costs if models is not None else self._of(worker_id).costs

    def on_load(self, worker_id: WorkerId, load: WorkerLoad, page_size: int) -> None:
        """A worker's report has come."""
        models = self._of(worker_id)
        before = models.prefill.linear.num_observed + models.decode.linear.num_observed
        if load.prefill_steps.steps or load.decode_steps.steps:
            models.decode.observe(load.decode_steps)
            since = models.prefill.observe(load.prefill_steps)
            if since is not None and since.tokens:
                _learn_queue(models, since.seconds / since.tokens)
        else:
            _learn_rates(models, load, page_size)
        if models.prefill.linear.num_observed + models.decode.linear.num_observed != before:
            models.refresh()

    def forget(self, worker_id: WorkerId) -> None:
        """The worker has left, or was born anew."""
        self._models.pop(worker_id, None)

    def _of(self, worker_id: WorkerId) -> _WorkerModels:
        models = self._models.get(worker_id)
        if models is None:
            models = self._models[worker_id] = _WorkerModels(self._pooled())
        return models

    def _pooled(self) -> WorkerCosts:
        known = self._models.values()
        prefill = [one.costs for one in known if one.prefill.linear.num_observed]
        decode = [one.costs.decode for one in known if one.decode.linear.num_observed]
        return WorkerCosts(
            _median((one.prefill for one in prefill), PREFILL_PRIOR),
            _median(decode, DECODE_PRIOR),
            median([one.queued_token_s for one in prefill]) if prefill else PREFILL_PRIOR.token_s,
        )


def _learn_queue(models: _WorkerModels, token_s: float) -> None:
    """Bounded by what the model makes of it, so that one odd report does not say how long a queue takes."""
    cost = models.prefill.cost
    sane_s = min(max(token_s, cost.token_s / 4), 4 * (cost.token_s + cost.fixed_s) + 1e5 * cost.context_s)
    weight = _SMOOTHING * 2 if models.prefill.linear.num_observed > 1 else 1.0
    models.queued_token_s += weight * (sane_s - models.queued_token_s)


def _learn_rates(models: _WorkerModels, load: WorkerLoad, page_size: int) -> None:
    """Of a worker that tells running means and no totals."""
    if load.prefill_tokens_per_s > 0:
        models.prefill.linear.observe((1, 1000, 0), 1000 / load.prefill_tokens_per_s)
        _learn_queue(models, 1 / load.prefill_tokens_per_s)
    if load.step_s > 0 and load.num_running:
        used = (load.total_pages - load.free_pages) * page_size
        models.decode.linear.observe((1, load.num_running, max(0, used)), load.step_s)


def _positive(cost: StepCost, prior: StepCost) -> tuple[float, float, float]:
    """A prior must not say that something is free: nothing could be learnt of it then."""
    return (
        max(cost.fixed_s, prior.fixed_s / 1e3),
        max(cost.token_s, prior.token_s / 1e3),
        max(cost.context_s, prior.context_s / 1e3),
    )


def _median(costs: Iterable[StepCost], default: StepCost) -> StepCost:
    known = list(costs)
    if not known:
        return default
    return StepCost(
        median(one.fixed_s for one in known),
        median(one.token_s for one in known),
        median(one.context_s for one in known),
    )
