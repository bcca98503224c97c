"""Learns what a step costs on each worker while it serves. Pure: no clock, no I/O.

A step takes a fixed time, a time for each token that it computes, and a time for each token of context that a computed
token attends to. Prefill and decode steps have separate models, because they hit different limits of a GPU. A model
starts from the median of the fleet's models and is fitted to the totals that its worker reports, by recursive least
squares with forgetting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from penstock.scheduling.linear_cost import ThreeTermCost, positive
from penstock.types import StepTotals, WorkerId, WorkerLoad

_SMOOTHING = 0.1
_MIN_OBSERVED_S = 0.02  # an observation covers steps that took at least this long together
_MAX_UNSEEN = 64  # observations for each worker of the fleet after which a model that made none of them is dropped


class StepCost(NamedTuple):
    """The cost of one step, in seconds."""

    fixed_s: float
    token_s: float  # for each token computed
    context_s: float  # for each pair of a computed token and an earlier token

    def prefill_s(self, num_tokens: float, context: float, chunk_tokens: int) -> float:
        """Returns the time to compute the last `num_tokens` of `context` tokens in chunks."""
        steps = -(-num_tokens // chunk_tokens)
        return steps * self.fixed_s + num_tokens * (self.token_s + self.context_s * (context - num_tokens / 2))


PREFILL_PRIOR = StepCost(fixed_s=0.005, token_s=5e-4, context_s=1e-8)
DECODE_PRIOR = StepCost(fixed_s=0.015, token_s=1e-4, context_s=1e-7)


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """A snapshot of a worker's models."""

    prefill: StepCost = PREFILL_PRIOR
    decode: StepCost = DECODE_PRIOR
    queued_token_s: float = PREFILL_PRIOR.token_s  # for each token of waiting prompts, averaged over contexts


PRIOR_COSTS = WorkerCosts()

_Mark = tuple[int, int, int, int]  # changes when unobserved workers take their peers' costs again
_NO_MARK: _Mark = (0, 0, 0, 0)


@dataclass(slots=True)
class _StepModel:
    linear: ThreeTermCost
    seen: StepTotals = field(default_factory=StepTotals)
    observed_at: int = 0  # the number of observations in the fleet when this model last learned

    def observe(self, totals: StepTotals) -> StepTotals | None:
        """Learns from the steps since the last observation and returns their totals; None if they are too few."""
        seen = self.seen
        if totals.steps < seen.steps:  # the worker has restarted
            self.seen = seen = StepTotals()
        if totals.seconds - seen.seconds < _MIN_OBSERVED_S or totals.steps == seen.steps:
            return None
        since, self.seen = totals.since(seen), totals
        self.linear.observe((since.steps, since.tokens, since.contexts), since.seconds)
        return since

    @property
    def cost(self) -> StepCost:
        return StepCost(*self.linear.coefficients)


class _WorkerModels:
    def __init__(self, prior: WorkerCosts) -> None:
        self.prefill = _StepModel(ThreeTermCost(positive(prior.prefill, PREFILL_PRIOR)))
        self.decode = _StepModel(ThreeTermCost(positive(prior.decode, DECODE_PRIOR)))
        self.queued_token_s = prior.queued_token_s
        self.known_costs = prior
        self.num_known = 0  # observations that `known_costs` includes

    @property
    def num_observed(self) -> int:
        return self.prefill.linear.num_observed + self.decode.linear.num_observed

    @property
    def is_partly_unknown(self) -> bool:
        return not (self.prefill.linear.num_observed and self.decode.linear.num_observed)

    @property
    def costs(self) -> WorkerCosts:
        """The present costs, computed only when read: reports are more frequent than placements."""
        num_observed = self.prefill.linear.num_observed + self.decode.linear.num_observed
        if num_observed != self.num_known:
            self.num_known = num_observed
            self.known_costs = WorkerCosts(self.prefill.cost, self.decode.cost, self.queued_token_s)
        return self.known_costs

    def drop_older(self, prefill: int, decode: int) -> None:
        """Drops each model that last learned when the fleet had fewer observations of its kind than this."""
        if self.prefill.linear.num_observed and self.prefill.observed_at < prefill:
            self.prefill.linear = ThreeTermCost(PREFILL_PRIOR)
        if self.decode.linear.num_observed and self.decode.observed_at < decode:
            self.decode.linear = ThreeTermCost(DECODE_PRIOR)

    def assume(self, pooled: WorkerCosts) -> None:
        """Resets each model that has no observations yet to the peers' costs."""
        if not self.prefill.linear.num_observed:
            self.prefill.linear = ThreeTermCost(positive(pooled.prefill, PREFILL_PRIOR))
            self.queued_token_s = pooled.queued_token_s
        if not self.decode.linear.num_observed:
            self.decode.linear = ThreeTermCost(positive(pooled.decode, DECODE_PRIOR))
        self.num_known = -1


class CostBook:
    """Holds the models of every worker.

    A worker without observations gets the median of its peers' costs, which a single false report barely moves. So does
    a worker whose peers have been observed many times since its own last observation. Otherwise a worker that was slow
    for a while would get no work as long as its peers have time to spare, and nothing would correct its costs. One that
    is still slow gets a request or two, from which its costs are learned again.
    """

    def __init__(self) -> None:
        self._models: dict[WorkerId, _WorkerModels] = {}
        self._num_prefill = self._num_decode = 0  # observations over all workers; reported rates count as prefill
        self._pool: tuple[_Mark, WorkerCosts] = _NO_MARK, PRIOR_COSTS  # the peers' median and when it was taken
        self._known: dict[WorkerId, WorkerCosts] = {}  # what `all_costs` has returned since the mark last changed
        self._known_mark = _NO_MARK
        self._learned: dict[WorkerId, None] = {}  # workers whose costs may differ from `_known`

    def costs(self, worker_id: WorkerId) -> WorkerCosts:
        """Returns the worker's costs: the same object until something is learned.

        A worker without observations takes its peers' median again whenever the number of observations has doubled, and
        every `_MAX_UNSEEN` observations for each worker. Otherwise a fast worker that was idle at the start would stay
        priced by the prior, as slow, and get no work from which its costs could be learned.
        """
        return self.all_costs([worker_id])[0]

    def all_costs(self, worker_ids: Sequence[WorkerId]) -> list[WorkerCosts]:
        """Returns the costs of each worker.

        Every request reads those of all workers, so costs are recomputed only where something was learned.
        """
        num_prefill, num_decode, known = self._num_prefill, self._num_decode, self._known
        unseen = _MAX_UNSEEN * (len(self._models) or 1)
        mark = num_prefill.bit_length(), num_decode.bit_length(), num_prefill // unseen, num_decode // unseen
        if mark != self._known_mark:
            self._known_mark = mark
            known.clear()
            for models in self._models.values():
                models.drop_older(num_prefill - unseen, num_decode - unseen)
        for worker_id in self._learned:
            if worker_id in known:
                known[worker_id] = self._models[worker_id].costs
        self._learned.clear()
        try:
            return list(map(known.__getitem__, worker_ids))
        except KeyError:
            for worker_id in worker_ids:
                if worker_id not in known:
                    known[worker_id] = self._compared(worker_id, mark).costs
            return list(map(known.__getitem__, worker_ids))

    def _compared(self, worker_id: WorkerId, mark: _Mark) -> _WorkerModels:
        """Returns the worker's models, after it has taken its peers' costs where it has no observations."""
        models = self._models_of(worker_id)
        if models.is_partly_unknown:
            if self._pool[0] != mark:
                self._pool = mark, self._pooled()
            models.assume(self._pool[1])
        return models

    def on_load(self, worker_id: WorkerId, load: WorkerLoad, page_size: int) -> None:
        """Learns from a worker's report."""
        if load.prefill_steps.steps or load.decode_steps.steps:
            self.on_steps(worker_id, load.prefill_steps, load.decode_steps)
            return
        models = self._models_of(worker_id)
        before = models.num_observed
        _learn_rates(models, load, page_size)
        self._num_prefill += models.num_observed - before
        models.prefill.observed_at, models.decode.observed_at = self._num_prefill, self._num_decode
        self._learned[worker_id] = None

    def on_steps(self, worker_id: WorkerId, prefill: StepTotals, decode: StepTotals) -> None:
        """Learns from the totals in a worker's report."""
        models = self._models.get(worker_id) or self._models_of(worker_id)
        if models.decode.observe(decode) is not None:
            self._num_decode += 1
            models.decode.observed_at = self._num_decode
            self._learned[worker_id] = None
        since = models.prefill.observe(prefill)
        if since is None:
            return
        self._num_prefill += 1
        models.prefill.observed_at = self._num_prefill
        self._learned[worker_id] = None
        if since.tokens:
            _learn_queue(models, since.seconds / since.tokens)

    def forget(self, worker_id: WorkerId) -> None:
        """Drops the models of a worker that has left or restarted."""
        self._models.pop(worker_id, None)
        self._known.pop(worker_id, None)

    def _models_of(self, worker_id: WorkerId) -> _WorkerModels:
        models = self._models.get(worker_id)
        if models is None:
            models = self._models[worker_id] = _WorkerModels(self._pooled())
        return models

    def _pooled(self) -> WorkerCosts:
        known = self._models.values()
        prefill = [models.costs for models in known if models.prefill.linear.num_observed]
        decode = [models.costs.decode for models in known if models.decode.linear.num_observed]
        return WorkerCosts(
            _median((costs.prefill for costs in prefill), PREFILL_PRIOR),
            _median(decode, DECODE_PRIOR),
            median([costs.queued_token_s for costs in prefill]) if prefill else PREFILL_PRIOR.token_s,
        )


def _learn_queue(models: _WorkerModels, token_s: float) -> None:
    """Learns how fast a queue drains. The model bounds each sample, so that one odd report changes little."""
    cost = models.prefill.cost
    bounded_s = min(max(token_s, cost.token_s / 4), 4 * (cost.token_s + cost.fixed_s) + 1e5 * cost.context_s)
    weight = _SMOOTHING * 2 if models.prefill.linear.num_observed > 1 else 1.0
    models.queued_token_s += weight * (bounded_s - models.queued_token_s)


def _learn_rates(models: _WorkerModels, load: WorkerLoad, page_size: int) -> None:
    """Learns from a worker that reports running means instead of totals."""
    if load.prefill_tokens_per_s > 0:
        models.prefill.linear.observe((1, 1000, 0), 1000 / load.prefill_tokens_per_s)
        _learn_queue(models, 1 / load.prefill_tokens_per_s)
    if load.step_s > 0 and load.num_running:
        used = (load.total_pages - load.free_pages) * page_size
        models.decode.linear.observe((1, load.num_running, max(0, used)), load.step_s)


def _median(costs: Iterable[StepCost], default: StepCost) -> StepCost:
    known = list(costs)
    return StepCost(*map(median, zip(*known, strict=True))) if known else default
