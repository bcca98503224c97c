"""Decides whether to pull pages that another worker holds or to compute them here. Pure: time is passed in.

Both are priced in seconds: pulling by how long earlier pulls from that worker took, computing by how long this worker's
own steps took, and each by the router's prediction until something is learned.

A pull that should end within one step of computing is waited for. Otherwise the prompt's first pages are computed while
the last ones are pulled, until the two meet, which takes `p * c / (p + c)` if either alone takes p or c. A pull that is
late, or whose source is gone, therefore costs at most the time of one step.

The limits (`max_pulls`, `min_pull_tokens`) are in `penstock.config.TransferConfig`, and `prompts` obeys them. A router
names a source only if `router.routing.policy.pulls` expects a pull to pay; pages travel in the batches of
`worker.handover.policy`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.errors import TransferError
from penstock.scheduling.linear_cost import LinearCost
from penstock.types import Epoch, StepTotals, WorkerId
from penstock.v1 import worker_pb2

_ADVANTAGE = 0.8  # a pull pays if the pages are there after less than this share of the time to compute them
_PATIENCE = 2.0  # a prompt waits for a pull this many times its predicted time,
_PATIENCE_S = 0.05  # or this much longer, whichever is more,
_UNKNOWN_SHARE = 0.5  # but not longer than one step, or this share of it for a source that nothing is known of
_BATCHES = 2  # batches of pages that arrive during one step
_TIMEOUT = 4.0  # a pull may take this many times the time to compute its pages,
_TIMEOUT_S = 2.0  # or this long, whichever is more
_LATENCY_S = 0.004
_COMPUTE_PRIOR = (5e-3, 5e-4, 1e-8)  # seconds per step, per token, and per token of its context
_MIN_STEPS_S = 0.02  # least step time in one observation
_STALE_S = 60.0  # costs of a source are forgotten after this long without a pull
_BACKOFF_S = 5.0  # no pulls from a source for this long after it refused or failed
_MAX_SOURCES = 1024
_UNFINISHED = 2.0  # assumed duration of an abandoned pull, as a multiple of its time so far


class PartlyPulled(TransferError):
    """The source has sent all that it still has, which is less than it was believed to have: no reason to avoid it."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that holds leading pages of a prompt as far as the router knows, with the router's predictions."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    own_address: str  # the address at which it reaches this worker
    cached_tokens: int  # leading tokens of the prompt in its pool
    pull_s: float = 0.0  # time to pull the ones that this worker lacks; 0: unknown
    compute_s: float = 0.0  # time to compute them instead; 0: unknown


def source_from_wire(message: worker_pb2.PrefixSource) -> PrefixSource:
    """Reads a source from a message that has one."""
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
    """The pages that a pull would bring, the last ones first, while the prompt may be computed from the other end."""

    num_tokens: int
    num_before: int  # tokens of the prompt before them
    num_bytes: int
    needs_all: bool = False  # whether the prompt can use none before the last of them has arrived


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A pull that pays, with times in seconds."""

    ready_s: float  # until the pages are here, pulled or computed
    compute_s: float  # time to compute all of them
    hold_s: float  # how long the prompt waits before it is computed beside the pull
    batch_s: float = 0.0  # time that one batch should take; 0: the largest batches

    @property
    def timeout_s(self) -> float:
        return max(_TIMEOUT * self.compute_s, self.hold_s, _TIMEOUT_S)


@dataclass(slots=True)
class _Source:
    cost: LinearCost  # linear in (1, bytes)
    learned_s: float = -math.inf  # time of the last pull from it
    avoided_until_s: float = -math.inf


@dataclass(slots=True)
class PullCosts:
    """Learns how long pulling and computing take here. Called on the step loop."""

    chunk_tokens: int  # prompt tokens in one step
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
        """Returns the pull, or None if computing should take less time or about as long."""
        known = self._known(source.worker_id, now_s)
        if known is not None and now_s < known.avoided_until_s:
            return None
        compute_s = self._compute_s(source, missing)
        pull_s = (known.cost if known else _link_prior(source, missing)).predict((1, missing.num_bytes))
        step_s = compute_s * (1.0 if missing.needs_all else min(1.0, self.chunk_tokens / missing.num_tokens))
        batch_s = step_s / _BATCHES
        longest_s = step_s if known is not None else _UNKNOWN_SHARE * step_s
        if pull_s < min(longest_s, _ADVANTAGE * compute_s):
            hold_s = min(longest_s, max(_PATIENCE * pull_s, pull_s + _PATIENCE_S))
            return PullPlan(pull_s, compute_s, hold_s, 0.0 if known is not None else batch_s)
        ready_s = step_s + _meet_s(pull_s, compute_s)
        return PullPlan(ready_s, compute_s, 0.0, batch_s) if ready_s < _ADVANTAGE * compute_s else None

    def on_pulled(self, source: PrefixSource, missing: MissingPages, seconds: float, now_s: float) -> None:
        """Learns from a pull that has succeeded."""
        self._learn(source, missing, seconds, now_s)

    def on_failed(self, source: PrefixSource, missing: MissingPages, seconds: float, now_s: float) -> None:
        """Learns from a pull that failed or was abandoned after `seconds`; avoids its source for a while."""
        known = self._known(source.worker_id, now_s)
        expected_s = (known.cost if known else _link_prior(source, missing)).predict((1, missing.num_bytes))
        known = self._learn(source, missing, _UNFINISHED * seconds if seconds > expected_s else expected_s, now_s)
        known.avoided_until_s = now_s + _BACKOFF_S

    def _compute_s(self, source: PrefixSource, missing: MissingPages) -> float:
        if not self._compute.num_observed and source.compute_s:
            return source.compute_s
        contexts = missing.num_tokens * (missing.num_before + missing.num_tokens / 2)
        num_steps = missing.num_tokens / self.chunk_tokens  # the last step computes the rest of the prompt in any case
        return self._compute.predict((num_steps, missing.num_tokens, contexts))

    def _known(self, worker_id: WorkerId, now_s: float) -> _Source | None:
        known = self._sources.get(worker_id)
        if known is not None and now_s > known.learned_s + _STALE_S:
            del self._sources[worker_id]  # the source may be faster now, which only a pull can show
            return None
        return known

    def _learn(self, source: PrefixSource, missing: MissingPages, seconds: float, now_s: float) -> _Source:
        known = self._known(source.worker_id, now_s)
        if known is None:  # the first pull counts in full, as the router's prediction may be far off
            if len(self._sources) >= _MAX_SOURCES:
                self._sources.clear()
            known = self._sources[source.worker_id] = _Source(_link_cost(seconds, missing.num_bytes))
        known.cost.observe((1, missing.num_bytes), seconds)
        known.learned_s = now_s
        return known


def _meet_s(pull_s: float, compute_s: float) -> float:
    """Returns when the pull and the computation, each of which would take that long alone, meet."""
    return pull_s * compute_s / (pull_s + compute_s) if compute_s else 0.0


def _link_prior(source: PrefixSource, missing: MissingPages) -> LinearCost:
    """Returns a cost that agrees with the router's prediction."""
    return _link_cost(source.pull_s, missing.num_bytes) if source.pull_s else LinearCost((_LATENCY_S, 1e-9))


def _link_cost(seconds: float, num_bytes: int) -> LinearCost:
    """Returns the cost of a link on which `num_bytes` take `seconds`."""
    return LinearCost((_LATENCY_S, max((seconds - _LATENCY_S) / num_bytes, 1e-11)))
