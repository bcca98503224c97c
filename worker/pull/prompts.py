"""Holds prompts back while some of their pages are pulled from another worker or read from the shared store.

Runs on the step loop. Meanwhile a prompt is in no queue and holds no pages. Once the pull has ended, successfully or
not, the prompt finds the received pages in the prefix cache and the rest is computed. Prompts that lack the same pages
share one pull.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine.engine import Engine
from engine.step.sequence import Sequence as TokenSequence
from penstock.config import TransferConfig
from penstock.errors import PenstockError
from penstock.metrics.worker_metrics import (
    PULL_FAILURES,
    PULL_SECONDS,
    PULLED_PAGES,
    PULLS,
    PULLS_CANCELLED,
    WorkerMetrics,
)
from penstock.types import PageHash, StepTotals
from penstock.v1 import common_pb2
from worker.pull.client import PullRequest, Stop
from worker.pull.policy import MissingPages, PartlyPulled, PrefixSource, PullCosts, PullPlan

log = logging.getLogger(__name__)

Then = Callable[[common_pb2.Pull | None], None]


class SharedStore(Protocol):
    """Implemented by `worker.pull.store.shared_pages.SharedPages`."""

    def on_prompt(self, sequence: TokenSequence) -> None:
        """Hears of a prompt that is about to be computed here."""

    def source(self, hashes: Sequence[PageHash]) -> PrefixSource | None:
        """Returns the store as a source of leading pages of a prompt, if it has any that this worker lacks."""

    def num_bytes(self, first: int, stop: int) -> int:
        """Returns how many bytes are read for these pages of a prompt."""

    def read(
        self,
        hashes: Sequence[PageHash],
        first: int,
        tenant: str,
        timeout_s: float,
        on_end: Callable[[PenstockError | None], None],
    ) -> Stop:
        """Caches `hashes[first:]` as they arrive, and calls `on_end` by the deadline. Returns a function that ends the
        read early.
        """


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The pages that a prompt would get from its source."""

    source: PrefixSource
    is_stored: bool  # whether the source is the shared store, not a worker
    hashes: Sequence[PageHash]  # hashes of the leading pages that the source holds
    first: int  # first page to pull: earlier ones are here or behind the model's window
    missing: MissingPages


@dataclass(slots=True)
class _Pull:
    wanted: _Wanted
    started_s: float
    stop: Stop = lambda: None
    waiting: dict[TokenSequence, Callable[[PenstockError | None], None]] = field(default_factory=dict)


class PrefixPulls:
    """Owns the pulls in flight and what is learned from them."""

    def __init__(
        self,
        engine: Engine,
        start: Callable[[PullRequest, Callable[[PenstockError | None], None]], Stop],
        totals: Callable[[], StepTotals],
        config: TransferConfig,
        clock: Callable[[], float] = time.monotonic,
        recall: Callable[[TokenSequence], None] = lambda sequence: None,
        store: SharedStore | None = None,
    ) -> None:
        """`start` is `PullClient.start`; `totals` returns the steps that have computed prompts here; `recall` copies
        the pages of a prompt that dead workers of this host have left; `store` is a source besides other workers.
        """
        self._engine = engine
        self._start = start
        self._totals = totals
        self._config = config
        self._clock = clock
        self.recall = recall
        self._store = store
        self._page_size = engine.layout.page_size
        self._open: dict[PageHash, _Pull] = {}  # by their first pages
        self._waiting: dict[TokenSequence, _Pull] = {}
        self.costs = PullCosts(engine.saturating_tokens)
        self.metrics = WorkerMetrics()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def predict(self, sequence: TokenSequence, source: PrefixSource | None) -> tuple[int, PullPlan] | None:
        """Returns how many of the prompt's tokens a pull would bring, and its plan; None if no pull pays."""
        best = self._best(sequence, source)
        return (best[0].missing.num_tokens, best[1]) if best is not None else None

    def bring(self, sequence: TokenSequence, source: PrefixSource | None, then: Then) -> None:
        """Calls `then` once the prompt's pull has ended, or at once if no pull pays.

        `then` receives a record of the pull, if there was one, and runs on the step loop. The prompt may have ended by
        then; whoever ends it calls `leave`.
        """
        if self._store is not None:
            self._store.on_prompt(sequence)
        wanted = next((each for each in self._choices(sequence, source) if each.hashes[each.first] in self._open), None)
        if wanted is None:
            best = self._best(sequence, source) if len(self._open) < self._config.max_pulls else None
            if best is None:
                then(None)
                return
            wanted, plan = best
            self._begin(wanted, plan, sequence)
        began_s = self._clock()
        pull = self._waiting[sequence] = self._open[wanted.hashes[wanted.first]]
        pull.waiting[sequence] = lambda problem: then(self._account(wanted, began_s, problem))

    def leave(self, sequence: TokenSequence) -> None:
        """Forgets a prompt that has ended, and stops its pull if no other prompt waits for it. What has arrived stays
        in the cache.
        """
        pull = self._waiting.pop(sequence, None)
        if pull is None:
            return
        pull.waiting.pop(sequence, None)
        if not pull.waiting and self._is_open(pull):
            self._close(pull)
            self.metrics.add(PULLS_CANCELLED)
            pull.stop()

    def _begin(self, wanted: _Wanted, plan: PullPlan, sequence: TokenSequence) -> None:
        pull = self._open[wanted.hashes[wanted.first]] = _Pull(wanted, self._clock())
        on_end = partial(self._on_end, pull)
        if wanted.is_stored:
            assert self._store is not None
            pull.stop = self._store.read(wanted.hashes, wanted.first, sequence.tenant, plan.patience_s, on_end)
        else:
            request = PullRequest(wanted.source, wanted.hashes[wanted.first :], sequence.lane, plan.patience_s)
            pull.stop = self._start(request, on_end)

    def _best(self, sequence: TokenSequence, source: PrefixSource | None) -> tuple[_Wanted, PullPlan] | None:
        """Returns the pull that should save most time, and its plan."""
        plans = [(wanted, self._plan(wanted)) for wanted in self._choices(sequence, source)]
        paying = [(wanted, plan) for wanted, plan in plans if plan is not None]
        return max(paying, key=lambda each: each[1].compute_s - each[1].pull_s, default=None)

    def _choices(self, sequence: TokenSequence, source: PrefixSource | None) -> list[_Wanted]:
        """Returns what could be pulled from the worker that the router names, and from the shared store."""
        if not self._engine.prefix_cache.enabled or sequence.scores_prompt:
            return []
        if source is not None and not self._config.pull:
            source = None
        if source is None and self._store is None:
            return []
        # At least one token is computed, because the first sampled token needs its logits.
        hashes = sequence.hash_full_pages(self._page_size)[: (len(sequence.token_ids) - 1) // self._page_size]
        stored = self._store.source(hashes) if self._store is not None else None
        found = [
            self._wanted(hashes, each, is_stored)
            for each, is_stored in ((source, False), (stored, True))
            if each is not None
        ]
        return [wanted for wanted in found if wanted is not None]

    def _wanted(self, hashes: Sequence[PageHash], source: PrefixSource, is_stored: bool) -> _Wanted | None:
        cache, size = self._engine.prefix_cache, self._page_size
        num_pages = min(len(hashes), source.cached_tokens // size)
        hashes = hashes[:num_pages]
        num_spared = num_pages - cache.peek(hashes)
        if num_spared * size < self._config.min_pull_tokens:
            return None
        first = max(cache.num_on_device(hashes), cache.first_needed(num_pages))
        num_bytes = (num_pages - first) * self._engine.model_layout.page_bytes
        if is_stored and self._store is not None:
            num_bytes = self._store.num_bytes(first, num_pages)
        missing = MissingPages(num_spared * size, (num_pages - num_spared) * size, num_bytes)
        return _Wanted(source, is_stored, hashes, first, missing)

    def _plan(self, wanted: _Wanted) -> PullPlan | None:
        self.costs.on_steps(self._totals())
        return self.costs.plan(wanted.source, wanted.missing, self._clock())

    def _on_end(self, pull: _Pull, problem: PenstockError | None) -> None:
        if not self._is_open(pull):
            return  # it was stopped
        wanted, now_s = pull.wanted, self._clock()
        seconds, num_pulled = now_s - pull.started_s, self._close(pull)
        if num_pulled < len(wanted.hashes) - wanted.first:
            self.metrics.add(PULL_FAILURES)
            if not isinstance(problem, PartlyPulled):
                self.costs.on_failed(wanted.source, wanted.missing, seconds, now_s)
            log.info("pulled %d pages from %s: %s", num_pulled, wanted.source.worker_id, problem or "it sent no more")
        else:
            self.costs.on_pulled(wanted.source, wanted.missing, seconds, now_s)
        waiting, pull.waiting = pull.waiting, {}
        for sequence, resume in waiting.items():
            if self._waiting.pop(sequence, None) is not None:
                resume(problem)

    def _is_open(self, pull: _Pull) -> bool:
        return self._open.get(pull.wanted.hashes[pull.wanted.first]) is pull

    def _close(self, pull: _Pull) -> int:
        """Counts a pull that brings no more pages. Returns how many it has brought."""
        del self._open[pull.wanted.hashes[pull.wanted.first]]
        num_pulled = self._num_pulled(pull.wanted)
        self.metrics.add(PULLS)
        self.metrics.add(PULLED_PAGES, num_pulled)
        self.metrics.add(PULL_SECONDS, self._clock() - pull.started_s)
        return num_pulled

    def _num_pulled(self, wanted: _Wanted) -> int:
        return max(0, self._engine.prefix_cache.num_on_device(wanted.hashes) - wanted.first)

    def _account(self, wanted: _Wanted, began_s: float, problem: PenstockError | None) -> common_pb2.Pull:
        num_pulled, num_wanted = self._num_pulled(wanted), len(wanted.hashes) - wanted.first
        reason = "" if num_pulled == num_wanted else (problem.message if problem else "not all of them came")
        return common_pb2.Pull(
            source=wanted.source.worker_id,
            wanted_tokens=num_wanted * self._page_size,
            pulled_tokens=num_pulled * self._page_size,
            pull_ms=(self._clock() - began_s) * 1e3,
            problem=reason,
        )
