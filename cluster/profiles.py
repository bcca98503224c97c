"""What a worker of each pool can do, learnt from the reports of those that run (`router.cost_model`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from cluster.scaling_signals import PoolSignal, Signals, WorkerSignal
from penstock.types import Role, StepTotals, WorkerId, WorkerLoad
from router.cost_model import DECODE_PRIOR, CostBook, LinearCost, StepCost

_PAGE_SIZE = 16  # for workers that tell no totals; only that path of the cost book asks for it
_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Profile:
    """Of an average worker. None: not learnt yet."""

    prefill_per_s: float | None = None  # uncached tokens of prompts
    decode: StepCost | None = None
    pages: float | None = None  # that sequences may hold


@dataclass(frozen=True, slots=True)
class Work:
    """Since the last observation."""

    prefill_tokens: float  # computed, plus what the queues have grown by
    num_running: int
    num_held: int  # sequences that a decode worker has, whatever their state
    pages: float
    context: float  # tokens of a running sequence's


class Profiles:
    """Follows every worker's totals.

    What decode steps cost is fitted over the whole pool, and as a cost of each sequence and each token of its context:
    one worker's batch hardly changes between two reports, those of several differ, and what a worker draws a second
    says more of the contexts of the moment than of the worker.
    """

    def __init__(self) -> None:
        self._costs = CostBook()
        self._seen: dict[WorkerId, tuple[int, StepTotals, StepTotals]] = {}
        self._queued: float | None = None
        self._drawn = StepTotals()  # by all workers since the last observation
        self._context = 0.0  # tokens before one that is drawn
        self._decode = LinearCost((DECODE_PRIOR.fixed_s, DECODE_PRIOR.token_s, DECODE_PRIOR.context_s))

    def observe(self, signals: Signals, waiting_tokens: float) -> Work:
        """Every ready worker must have told its load."""
        ready = [one for pool in signals.pools.values() for one in pool.ready]
        for gone in self._seen.keys() - {one.worker_id for one in ready}:
            del self._seen[gone]
            self._costs.forget(gone)
        self._drawn = StepTotals()
        prefill = sum(self._follow(one) for one in ready)
        if self._drawn.tokens:
            context = self._drawn.contexts / self._drawn.tokens
            self._context += (_SMOOTHING if self._context else 1.0) * (context - self._context)
        loads = [one.load for one in ready if one.load is not None]
        queued = sum(load.queued_prefill_tokens for load in loads) + waiting_tokens
        grown = queued - self._queued if self._queued is not None else 0.0
        self._queued = queued
        decoding = _loads(signals.pools[Role.DECODE])
        return Work(
            max(0.0, prefill + grown),
            sum(load.num_running for load in decoding),
            sum(load.num_running + load.num_waiting for load in decoding),
            float(sum(load.total_pages - load.free_pages for load in decoding)),
            self._context,
        )

    def _follow(self, one: WorkerSignal) -> float:
        """Tokens of prompts that this incarnation has computed since its last report."""
        load = one.load
        assert load is not None
        epoch, chunks, steps = self._seen.get(one.worker_id, (one.epoch, StepTotals(), StepTotals()))
        if one.worker_id not in self._seen or epoch != one.epoch or load.prefill_steps.steps < chunks.steps:
            self._seen[one.worker_id] = (one.epoch, load.prefill_steps, load.decode_steps)
            self._costs.forget(one.worker_id)
            return 0.0
        self._costs.on_load(one.worker_id, load, _PAGE_SIZE)
        self._seen[one.worker_id] = (one.epoch, load.prefill_steps, load.decode_steps)
        computed = load.prefill_steps.since(chunks).tokens
        drawn = load.decode_steps.since(steps)
        if drawn.tokens:
            self._decode.observe((drawn.steps, drawn.tokens, drawn.contexts), drawn.seconds)
            self._drawn = self._drawn.with_more(drawn)
        return float(computed)

    def profile(self, signals: Signals) -> Profile:
        known = {
            role: [(one.worker_id, one.load) for one in pool.ready if one.load] for role, pool in signals.pools.items()
        }
        computing = [self._costs.costs(name) for name, load in known[Role.PREFILL] if load.prefill_steps.steps]
        if not computing:  # decode workers compute prompts where nobody else does
            computing = [self._costs.costs(name) for name, load in known[Role.DECODE] if load.prefill_steps.steps]
        prefill_s = median([one.queued_token_s for one in computing]) if computing else None
        pages = [load.total_pages for load in _loads(signals.pools[Role.DECODE])]
        return Profile(
            1.0 / prefill_s if prefill_s else None,
            StepCost(*self._decode.coefficients) if self._decode.num_observed else None,
            float(median(pages)) if pages else None,
        )


def _loads(pool: PoolSignal) -> list[WorkerLoad]:
    return [one.load for one in pool.ready if one.load is not None]
