"""Decides whether pages that another worker holds are pulled or computed here. Pure: time is passed in.

Both ways are priced in seconds: pulling by what earlier pulls from that worker took, computing by what this worker's
own steps took, and each by the router's prediction until something is learned. A prompt never waits longer for a pull
than computing the same pages is predicted to take, so the worst pull costs as much again as it would have saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.scheduling.linear_cost import LinearCost
from penstock.types import Epoch, StepTotals, WorkerId
from penstock.v1 import worker_pb2

_ADVANTAGE = 0.8  # a pull is worth it where it takes less than this share of the time to compute
_PATIENCE = 2.0  # a pull may take this many times its prediction,
_PATIENCE_S = 0.05  # or this much longer, whichever is more
_LATENCY_S = 0.004
_COMPUTE_PRIOR = (5e-3, 5e-4, 1e-8)  # seconds for a step, a token, and each token of context that it attends to
_MIN_STEPS_S = 0.02  # of steps in one observation
_STALE_S = 60.0  # what was learned of a source is forgotten after this long without a pull
_BACKOFF_S = 5.0  # without pulls from a source that refused or failed
_MAX_SOURCES = 1024
_UNFINISHED = 2.0  # a pull that was given up would have taken this many times as long, at least


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that holds leading pages of a prompt, as the router knows it, with the router's predictions."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    own_address: str  # at which it reaches this worker
    cached_tokens: int  # leading tokens of the prompt, in its pool
    pull_s: float = 0.0  # to pull what this worker lacks of them; 0: unknown
    compute_s: float = 0.0  # to compute that instead; 0: unknown


def source_from_wire(message: worker_pb2.PrefixSource) -> PrefixSource:
    """Reads a source that is present in its message."""
    return PrefixSource(
        WorkerId(message.worker_id),
        Epoch(message.epoch),
        message.address,
        message.own_address,
        message.cached_tokens,
        message.pull_s,
        message.compute_s,
    )


@dataclass(frozen=True, slots=True)
class MissingPages:
    """The pages that a pull would bring."""

    num_tokens: int
    num_before: int  # tokens of the prompt before them
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A pull that is worth it, in seconds."""

    pull_s: float
    compute_s: float  # to compute the same pages
    patience_s: float  # how long a prompt waits for it


@dataclass(slots=True)
class _Source:
    cost: LinearCost  # of (1, bytes)
    learned_s: float = -math.inf  # when it was last pulled from
    avoided_until_s: float = -math.inf


@dataclass(slots=True)
class PullCosts:
    """Learns what pulling and computing take here. Called on the step loop."""

    chunk_tokens: int  # of prompts, in one step
    _compute: LinearCost = field(default_factory=lambda: LinearCost(_COMPUTE_PRIOR))
    _seen: StepTotals = field(default_factory=StepTotals)
    _sources: dict[WorkerId, _Source] = field(default_factory=dict)

    def on_steps(self, totals: StepTotals) -> None:
        """Learns from the steps that have computed prompts since the last call."""
        since = totals.since(self._seen)
        if since.seconds >= _MIN_STEPS_S and since.tokens:
            self._seen = totals
            self._compute.observe((since.steps, since.tokens, since.contexts), since.seconds)

    def plan(self, source: PrefixSource, missing: MissingPages, now_s: float) -> PullPlan | None:
        """Returns the pull, or None where computing is predicted to take less, or about as long."""
        known = self._known(source.worker_id, now_s)
        if known is not None and now_s < known.avoided_until_s:
            return None
        compute_s = self._compute_s(source, missing)
        pull_s = (known.cost if known else _link_prior(source, missing)).predict((1, missing.num_bytes))
        if pull_s >= _ADVANTAGE * compute_s:
            return None
        patience_s = min(compute_s, max(_PATIENCE * pull_s, pull_s + _PATIENCE_S))
        return PullPlan(pull_s, compute_s, patience_s)

    def on_pulled(self, source: PrefixSource, missing: MissingPages, seconds: float, now_s: float) -> None:
        """Learns from a pull that has brought its pages."""
        self._learn(source, missing, seconds, now_s)

    def on_failed(self, source: PrefixSource, missing: MissingPages, seconds: float, now_s: float) -> None:
        """Learns from a pull that failed or was given up after `seconds`; avoids its source for a while."""
        known = self._known(source.worker_id, now_s)
        expected_s = (known.cost if known else _link_prior(source, missing)).predict((1, missing.num_bytes))
        known = self._learn(source, missing, _UNFINISHED * seconds if seconds > expected_s else expected_s, now_s)
        known.avoided_until_s = now_s + _BACKOFF_S

    def _compute_s(self, source: PrefixSource, missing: MissingPages) -> float:
        if not self._compute.num_observed and source.compute_s:
            return source.compute_s
        contexts = missing.num_tokens * (missing.num_before + missing.num_tokens / 2)
        num_steps = missing.num_tokens / self.chunk_tokens  # the last one computes the rest of the prompt in any case
        return self._compute.predict((num_steps, missing.num_tokens, contexts))

    def _known(self, worker_id: WorkerId, now_s: float) -> _Source | None:
        known = self._sources.get(worker_id)
        if known is not None and now_s > known.learned_s + _STALE_S:
            del self._sources[worker_id]  # it may be better now, which only a pull would show
            return None
        return known

    def _learn(self, source: PrefixSource, missing: MissingPages, seconds: float, now_s: float) -> _Source:
        known = self._known(source.worker_id, now_s)
        if known is None:  # the first pull counts in full: the router's prediction may be off by orders of magnitude
            if len(self._sources) >= _MAX_SOURCES:
                self._sources.clear()
            known = self._sources[source.worker_id] = _Source(_link_cost(seconds, missing.num_bytes))
        known.cost.observe((1, missing.num_bytes), seconds)
        known.learned_s = now_s
        return known


def _link_prior(source: PrefixSource, missing: MissingPages) -> LinearCost:
    """Returns a cost that agrees with the router's prediction."""
    return _link_cost(source.pull_s, missing.num_bytes) if source.pull_s else LinearCost((_LATENCY_S, 1e-9))


def _link_cost(seconds: float, num_bytes: int) -> LinearCost:
    """Returns the cost of a link over which that many bytes take `seconds`."""
    return LinearCost((_LATENCY_S, max((seconds - _LATENCY_S) / num_bytes, 1e-11)))
