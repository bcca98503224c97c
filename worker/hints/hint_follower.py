"""Follows the hints of sequences at this worker, and answers them. Runs on the step loop.

The prefix cache decides what a hint does to pages; this module calls it at the right times and counts the outcomes. A
prefetch takes pages that are free or evictable, never those of running sequences, and copies a bounded number of them
between two steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.cache.retention.holds import Lost
from engine.engine import Engine
from engine.step.sequence import Sequence
from penstock.kv.kv_hints import Hint, HintAnswer, HintOutcome, KvHints
from penstock.metrics.worker_metrics import (
    HELD_BYTES,
    HELD_PAGES,
    HINTS_ACCEPTED,
    HINTS_CLIPPED,
    HINTS_REFUSED,
    HOLDS_LOST,
    PREFETCHED_PAGES,
    SESSIONS,
)
from penstock.types import Lane, WorkerId
from worker.hints.prefetches import Prefetch, PrefetchQueue

_COUNTERS = {
    HintOutcome.ACCEPTED: HINTS_ACCEPTED,
    HintOutcome.CLIPPED: HINTS_CLIPPED,
    HintOutcome.REFUSED: HINTS_REFUSED,
}
_MAX_TENANTS = 64  # tenants whose held pages are reported by name
_PAGES_AT_ONCE = 256  # most pages copied between two steps


class HintFollower:
    """Owns the prefetches that wait. The prefix cache owns sessions, holds and their quotas."""

    def __init__(
        self,
        worker_id: WorkerId,
        engine: Engine,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """`on_end` is called for every sequence that ends here, while it holds its pages."""
        self._worker_id = worker_id
        self._on_end = on_end
        self._cache = engine.prefix_cache
        self._pool = engine.pool
        self._page_size = engine.layout.page_size
        self._page_bytes = engine.model_layout.page_bytes
        self._clock = clock
        self._prefetches = PrefetchQueue(self._pool.retention.config.max_prefetches)
        self._counts = {metric.name: 0.0 for metric in (*_COUNTERS.values(), PREFETCHED_PAGES)}

    def follow(self, sequence: Sequence, num_found_tokens: int) -> list[HintAnswer]:
        """Follows the hints of a sequence that ends here and still holds its pages; returns the answers.

        `num_found_tokens` leading tokens were cached before it. Without hints, the other pages of a bulk sequence are
        given up, so that batches evict their own pages before those of interactive requests.
        """
        hints, now_s = sequence.kv_hints, self._clock()
        self._on_end(sequence)
        if not hints and sequence.lane is not Lane.BULK:
            return []
        num_full = (len(sequence.token_ids) if hints.only else sequence.num_computed_tokens) // self._page_size
        hashes = sequence.hash_full_pages(self._page_size)[:num_full]
        if not hints:
            self._cache.hints.give_up_own(sequence.tenant, hashes, num_found_tokens // self._page_size, now_s)
            return []
        answers = list(self._cache.hints.apply(sequence.tenant, hints, hashes, now_s))
        if hints.prefetch_s is not None:
            answers.append(self._plan_prefetch(hints, Prefetch(sequence.tenant, hashes), now_s))
        for answer in answers:
            self._count(_COUNTERS[answer.outcome].name)
        return [replace(answer, worker_id=self._worker_id) for answer in answers]

    def _plan_prefetch(self, hints: KvHints, prefetch: Prefetch, now_s: float) -> HintAnswer:
        if hints.end_session or hints.demote:
            reason = "the same request gives its pages up"
        elif not self._cache.has_tiers:
            reason = "this worker keeps no evicted pages (engine.host_memory_bytes)"
        elif not self._prefetches.add(prefetch, now_s + (hints.prefetch_s or 0.0)):
            reason = "too many prefetches wait already (engine.retention.max_prefetches)"
        else:
            return HintAnswer(Hint.PREFETCH, HintOutcome.ACCEPTED, num_pages=len(prefetch.hashes))
        return HintAnswer(Hint.PREFETCH, HintOutcome.REFUSED, reason)

    def sweep(self, now_s: float) -> float | None:
        """Ends holds that have run out, and begins a prefetch that is due. Returns when to sweep again."""
        self._pool.retention.expire(now_s)
        prefetch = self._prefetches.take_due(now_s)
        if prefetch is not None:
            self._bring(prefetch, now_s)
        times = [at_s for at_s in (self._prefetches.next_s, self._pool.retention.holds.next_expiry_s) if at_s]
        return min(times, default=None)

    def _bring(self, prefetch: Prefetch, now_s: float) -> None:
        """Copies the next pages of a prompt that only lower tiers hold; the rest follows after the next step."""
        num_held = len(self._pool.retention.holds)  # a prefetch must not evict them
        num_spare = self._pool.num_available - num_held - self._pool.num_reserve
        num_brought, is_complete = self._cache.bring(
            prefetch.hashes, min(_PAGES_AT_ONCE, num_spare), owner=prefetch.tenant
        )
        self._count(PREFETCHED_PAGES.name, num_brought)
        if num_brought and not is_complete:
            self._prefetches.add(prefetch, now_s)

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counts[name] += amount

    def values(self) -> Mapping[str, float]:
        """Returns the metric values of this worker's hints. May be called from any thread."""
        holds = self._pool.retention.holds
        return {
            **self._counts,
            HELD_PAGES.name: float(len(holds)),
            HELD_BYTES.name: float(len(holds) * self._page_bytes),
            SESSIONS.name: float(len(self._cache.hints.sessions)),
            HOLDS_LOST.name: float(holds.num_lost[Lost.PRESSURE]),
        }

    def held_by_tenant(self) -> Mapping[str, int]:
        """Returns how many pages each of the tenants that hold most has, and all others together as `other`.

        May be called from any thread.
        """
        held = Counter(dict(self._pool.retention.holds.num_held))
        shown = dict(held.most_common(_MAX_TENANTS))
        rest = held.total() - sum(shown.values())
        return shown | ({"other": rest} if rest else {})
