"""Learns from load reports what an average worker of each pool can do (`router.routing.costs`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from cluster.scaling.signals import PoolSignal, Signals, WorkerSignal
from penstock.scheduling.linear_cost import LinearCost
from penstock.types import Role, StepTotals, WorkerId, WorkerLoad
from router.routing.costs.cost_model import DECODE_PRIOR, CostBook, StepCost

_PAGE_SIZE = 16  # the cost book needs it only for workers that report no totals
_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """An average worker's speed and capacity; None where not learned yet."""

    prefill_per_s: float | None = None  # uncached prompt tokens per second
    decode: StepCost | None = None
    pages: float | None = None  # pages available to sequences


@dataclass(frozen=True, slots=True)
class ObservedWork:
    """Work since the last observation."""

    prefill_tokens: float  # prompt tokens computed, plus the growth of the queues
    num_running: int
    num_held: int  # sequences at decode workers, in any state
    pages: float
    context: float  # mean context of a running sequence, in tokens


class WorkerProfiles:
    """Follows every worker's totals and fits costs to them.

    Decode costs are fitted over the whole pool, as a cost for each sequence and each token of its context: one worker's
    batch hardly changes between two reports, while the batches of several workers differ, and a worker's tokens per
    second depend more on its current contexts than on the worker.
    """

    def __init__(self) -> None:
        self._costs = CostBook()
        self._seen: dict[WorkerId, tuple[int, StepTotals, StepTotals]] = {}
        self._queued: float | None = None
        self._decoded = StepTotals()  # decode steps of all workers since the last observation
        self._context = 0.0  # mean context of a generated token, in tokens
        self._decode = LinearCost((DECODE_PRIOR.fixed_s, DECODE_PRIOR.token_s, DECODE_PRIOR.context_s))

    def observe(self, signals: Signals, waiting_tokens: float) -> ObservedWork:
        """Takes the newest reports; every ready worker must have one. `waiting_tokens` counts tokens that wait in the
        routers.
        """
        ready = [worker for pool in signals.pools.values() for worker in pool.ready]
        for gone in self._seen.keys() - {worker.worker_id for worker in ready}:
            del self._seen[gone]
            self._costs.forget(gone)
        self._decoded = StepTotals()
        prefill = sum(self._follow(worker) for worker in ready)
        if self._decoded.tokens:
            context = self._decoded.contexts / self._decoded.tokens
            self._context += (_SMOOTHING if self._context else 1.0) * (context - self._context)
        loads = [worker.load for worker in ready if worker.load is not None]
        queued = sum(load.queued_prefill_tokens for load in loads) + waiting_tokens
        grown = queued - self._queued if self._queued is not None else 0.0
        self._queued = queued
        decoding = _loads(signals.pools[Role.DECODE])
        return ObservedWork(
            max(0.0, prefill + grown),
            sum(load.num_running for load in decoding),
            sum(load.num_running + load.num_waiting for load in decoding),
            float(sum(load.total_pages - load.free_pages for load in decoding)),
            self._context,
        )

    def _follow(self, worker: WorkerSignal) -> float:
        """Returns the prompt tokens that this incarnation has computed since its last report."""
        load = worker.load
        assert load is not None
        epoch, chunks, steps = self._seen.get(worker.worker_id, (worker.epoch, StepTotals(), StepTotals()))
        if worker.worker_id not in self._seen or epoch != worker.epoch or load.prefill_steps.steps < chunks.steps:
            self._seen[worker.worker_id] = (worker.epoch, load.prefill_steps, load.decode_steps)
            self._costs.forget(worker.worker_id)
            return 0.0
        self._costs.on_load(worker.worker_id, load, _PAGE_SIZE)
        self._seen[worker.worker_id] = (worker.epoch, load.prefill_steps, load.decode_steps)
        computed = load.prefill_steps.since(chunks).tokens
        decoded = load.decode_steps.since(steps)
        if decoded.tokens:
            self._decode.observe((decoded.steps, decoded.tokens, decoded.contexts), decoded.seconds)
            self._decoded = self._decoded.with_more(decoded)
        return float(computed)

    def profile(self, signals: Signals) -> WorkerProfile:
        """Returns the medians over the ready workers as one profile."""
        known = {
            role: [(worker.worker_id, worker.load) for worker in pool.ready if worker.load]
            for role, pool in signals.pools.items()
        }
        computing = [self._costs.costs(name) for name, load in known[Role.PREFILL] if load.prefill_steps.steps]
        if not computing:  # without prefill workers, decode workers compute the prompts
            computing = [self._costs.costs(name) for name, load in known[Role.DECODE] if load.prefill_steps.steps]
        prefill_s = median([costs.queued_token_s for costs in computing]) if computing else None
        pages = [load.total_pages for load in _loads(signals.pools[Role.DECODE])]
        return WorkerProfile(
            1.0 / prefill_s if prefill_s else None,
            StepCost(*self._decode.coefficients) if self._decode.num_observed else None,
            float(median(pages)) if pages else None,
        )


def _loads(pool: PoolSignal) -> list[WorkerLoad]:
    return [worker.load for worker in pool.ready if worker.load is not None]
