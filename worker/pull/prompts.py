"""Pulls some of a prompt's pages from another worker, or reads them from the shared store, for prompts that are about
to be computed.

Runs on the step loop. A short pull is waited for: meanwhile the prompt is in no queue and holds no pages. Otherwise the
prompt is queued at once, and the scheduler lets it continue with the pages that have arrived as soon as those before
them are computed (`PrefixCache.await_pages`). A pull ends when its source has sent everything or has failed, or when no
prompt needs its pages any more. Prompts that lack the same pages share one pull.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from engine.engine import Engine
from engine.step.sequence import Sequence as TokenSequence
from penstock.config import TransferConfig
from penstock.errors import PenstockError, TransferError
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

Begin = Callable[[common_pb2.Pull | None], None]


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
        *,
        latest_first: bool,
    ) -> Stop:
        """Caches `hashes[first:]` as they arrive, and calls `on_end` by the deadline. Returns a function that ends the
        read early. Unless read `latest_first`, the pages are of use only as a whole.
        """


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The pages that a prompt would get from its source."""

    source: PrefixSource
    is_stored: bool  # whether the source is the shared store, not a worker
    hashes: Sequence[PageHash]  # hashes of the leading pages that the source holds
    first: int  # first page to pull: earlier ones are here or behind the model's window
    missing: MissingPages

    @property
    def pages(self) -> Sequence[PageHash]:
        return self.hashes[self.first :]

    @property
    def awaited(self) -> Sequence[PageHash]:
        """The pages that may arrive before their parents are computed."""
        return () if self.missing.needs_all else self.pages


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that a pull brings pages for."""

    wanted: _Wanted
    joined_s: float
    record: common_pb2.Pull
    begin: Begin | None  # None once it was called


@dataclass(slots=True, eq=False)
class _Pull:
    wanted: _Wanted
    plan: PullPlan
    started_s: float
    stop: Stop = lambda: None
    prompts: dict[TokenSequence, _Prompt] = field(default_factory=dict)
    ended_s: float | None = None
    problem: PenstockError | None = None


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
        self._open: list[_Pull] = []
        self._by_prompt: dict[TokenSequence, _Pull] = {}  # also pulls that have ended, until the prompt is computed
        self.costs = PullCosts(engine.saturating_tokens)
        self.metrics = WorkerMetrics()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def predict(self, sequence: TokenSequence, source: PrefixSource | None) -> tuple[int, PullPlan] | None:
        """Returns how many of the prompt's tokens a pull would bring, and its plan; None if no pull pays."""
        best = self._best(sequence, source)
        return (best[0].missing.num_tokens, best[1]) if best is not None else None

    def bring(self, sequence: TokenSequence, source: PrefixSource | None, begin: Begin) -> None:
        """Calls `begin` on the step loop when the prompt should be queued, which is now or shortly afterwards.

        `begin` receives a record of the prompt's pull, if there is one, which changes until the prompt is computed. The
        prompt may have ended by then; whoever ends it calls `leave`.
        """
        self.leave(sequence)
        if self._store is not None:
            self._store.on_prompt(sequence)
        found = self._open_pull(sequence, source) or self._begin_pull(sequence, source)
        if found is None:
            begin(None)
            return
        pull, wanted = found
        num_tokens = len(wanted.pages) * self._page_size
        record = common_pb2.Pull(source=pull.wanted.source.worker_id, wanted_tokens=num_tokens)
        pull.prompts[sequence] = _Prompt(wanted, self._clock(), record, begin)
        self._by_prompt[sequence] = pull
        self._begin_if_due(sequence, self._clock())

    def leave(self, sequence: TokenSequence) -> None:
        """Completes the record of a prompt that is computed or has ended, and stops its pull if no other prompt needs
        the pages. Those that have arrived stay cached if they can be found.
        """
        pull = self._by_prompt.pop(sequence, None)
        if pull is None:
            return
        prompt = pull.prompts.pop(sequence)
        if not pull.prompts and pull.ended_s is None:
            self._close(pull)
            pull.stop()
            if self._is_past(sequence, prompt):
                self._learn(pull)
            else:
                self.metrics.add(PULLS_CANCELLED)
        self._fill(prompt, pull)
        if not pull.prompts:
            self._engine.prefix_cache.unawait(pull.wanted.awaited)

    def sweep(self, now_s: float) -> float | None:
        """Queues the prompts that have waited long enough, and forgets those that need their pulls no more. Returns
        when to sweep again.
        """
        for sequence, pull in list(self._by_prompt.items()):
            prompt = pull.prompts.get(sequence)
            if prompt is not None and prompt.begin is None and self._is_past(sequence, prompt):
                self.leave(sequence)
            elif prompt is not None:
                self._begin_if_due(sequence, now_s)
        held = (pull for pull in self._open if any(prompt.begin for prompt in pull.prompts.values()))
        return min((_held_until_s(pull) for pull in held), default=None)

    def _is_past(self, sequence: TokenSequence, prompt: _Prompt) -> bool:
        """Returns whether a prompt has all the pages that it wanted."""
        return sequence.num_computed_tokens >= len(prompt.wanted.hashes) * self._page_size

    def _begin_if_due(self, sequence: TokenSequence, now_s: float) -> None:
        """Queues a prompt unless it waits for its pull, or was queued before."""
        pull = self._by_prompt[sequence]
        prompt = pull.prompts[sequence]
        if prompt.begin is not None and (pull.ended_s is not None or now_s >= _held_until_s(pull)):
            begin, prompt.begin = prompt.begin, None
            begin(prompt.record)

    def _open_pull(self, sequence: TokenSequence, source: PrefixSource | None) -> tuple[_Pull, _Wanted] | None:
        """Returns an open pull that brings pages of the prompt, and those that the prompt wants."""
        for wanted in self._choices(sequence, source) if self._open else ():
            for pull in self._open:
                if wanted.pages[0] in pull.wanted.pages:
                    return pull, wanted
        return None

    def _begin_pull(self, sequence: TokenSequence, source: PrefixSource | None) -> tuple[_Pull, _Wanted] | None:
        """Begins a pull if one pays."""
        best = self._best(sequence, source) if len(self._open) < self._config.max_pulls else None
        if best is None:
            return None
        wanted, plan = best
        pull = _Pull(wanted, plan, self._clock())
        self._open.append(pull)
        self._engine.prefix_cache.await_pages(wanted.awaited)
        on_end, latest_first = partial(self._on_end, pull), not wanted.missing.needs_all
        timeout_s = plan.timeout_s if latest_first else plan.hold_s
        if wanted.is_stored:
            assert self._store is not None
            pull.stop = self._store.read(
                wanted.hashes, wanted.first, sequence.tenant, timeout_s, on_end, latest_first=latest_first
            )
        else:
            request = PullRequest(wanted.source, wanted.pages, sequence.lane, timeout_s, latest_first, plan.batch_s)
            pull.stop = self._start(request, on_end)
        return pull, wanted

    def _best(self, sequence: TokenSequence, source: PrefixSource | None) -> tuple[_Wanted, PullPlan] | None:
        """Returns the pull that should save most time, and its plan."""
        plans = [(wanted, self._plan(wanted)) for wanted in self._choices(sequence, source)]
        paying = [(wanted, plan) for wanted, plan in plans if plan is not None]
        return max(paying, key=lambda each: each[1].compute_s - each[1].ready_s, default=None)

    def _choices(self, sequence: TokenSequence, source: PrefixSource | None) -> list[_Wanted]:
        """Returns what could be pulled from the worker that the router names, and from the shared store. Pages with two
        parts are not pulled.
        """
        if not self._engine.prefix_cache.enabled or sequence.scores_prompt or self._engine.pool.parts is not None:
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
        needs_all = cache.window.tokens is not None  # then only the last window is pulled
        missing = MissingPages(num_spared * size, (num_pages - num_spared) * size, num_bytes, needs_all)
        return _Wanted(source, is_stored, hashes, first, missing)

    def _plan(self, wanted: _Wanted) -> PullPlan | None:
        self.costs.on_steps(self._totals())
        return self.costs.plan(wanted.source, wanted.missing, self._clock())

    def _on_end(self, pull: _Pull, problem: PenstockError | None) -> None:
        if pull.ended_s is not None:
            return  # it was stopped
        if problem is None and self._num_absent(pull.wanted):
            problem = TransferError("not all of them came")
        pull.problem = problem
        self._close(pull)
        self._learn(pull)
        for sequence, prompt in list(pull.prompts.items()):
            self._fill(prompt, pull)
            if sequence in pull.prompts:
                self._begin_if_due(sequence, pull.started_s)

    def _close(self, pull: _Pull) -> None:
        """Counts a pull that brings no more pages."""
        pull.ended_s = self._clock()
        self._open.remove(pull)
        self.metrics.add(PULLS)
        self.metrics.add(PULLED_PAGES, self._num_pulled(pull.wanted))
        self.metrics.add(PULL_SECONDS, pull.ended_s - pull.started_s)

    def _learn(self, pull: _Pull) -> None:
        """Learns from a pull that has ended, or that the prompts need no more because the rest is computed."""
        wanted, now_s = pull.wanted, self._clock()
        seconds, num_pulled, num_wanted = now_s - pull.started_s, self._num_pulled(wanted), len(wanted.pages)
        if num_pulled < num_wanted and (num_pulled == 0 or self._num_absent(wanted)):
            self.metrics.add(PULL_FAILURES)
            if not isinstance(pull.problem, PartlyPulled):
                self.costs.on_failed(wanted.source, wanted.missing, seconds, now_s)
            problem = pull.problem or "they were computed sooner"
            log.info("pulled %d of %d pages from %s: %s", num_pulled, num_wanted, wanted.source.worker_id, problem)
        else:
            num_bytes = wanted.missing.num_bytes * num_pulled // num_wanted
            self.costs.on_pulled(wanted.source, replace(wanted.missing, num_bytes=num_bytes), seconds, now_s)

    def _num_pulled(self, wanted: _Wanted) -> int:
        return self._engine.prefix_cache.num_present(wanted.pages, only_grafted=True)

    def _num_absent(self, wanted: _Wanted) -> int:
        """Returns how many of the wanted pages are neither pulled nor computed."""
        return len(wanted.pages) - self._engine.prefix_cache.num_present(wanted.pages)

    def _fill(self, prompt: _Prompt, pull: _Pull) -> None:
        """Writes into a prompt's record what has become of its pull."""
        record, wanted = prompt.record, prompt.wanted
        ended_s = self._clock() if pull.ended_s is None else pull.ended_s
        record.pulled_tokens = self._num_pulled(wanted) * self._page_size
        record.pull_ms = max(0.0, ended_s - prompt.joined_s) * 1e3
        is_whole = record.pulled_tokens == record.wanted_tokens
        record.problem = "" if is_whole or pull.problem is None else pull.problem.message


def _held_until_s(pull: _Pull) -> float:
    return pull.started_s + pull.plan.hold_s
