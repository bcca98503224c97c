"""Which prompts a prefill step computes, and how much of each. Pure bookkeeping over the page pool: no I/O, no clock.

First come, first served: prompts already begun go on first, new ones join while the token budget and the pool allow.
A prompt takes all its pages when its first chunk is scheduled, so a begun prompt never waits for pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from engine.page_pool import OutOfPages, PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import ScheduledSequence, Sequence


class PrefillScheduler:
    """Owns the queue and the batch. `schedule` and `commit` alternate; both run on the step loop."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache, page_size: int, max_batch_tokens: int, max_batch_sequences: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self._queue: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(sequence.num_uncomputed_tokens for sequence in (*self._running, *self._queue))

    def add(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that is queued or running; its pages stay with the caller."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._queue:
            self._queue.remove(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step's chunks, at most `max_batch_tokens` in all; newly begun prompts now hold their pages."""
        budget = self._max_batch_tokens
        work: list[ScheduledSequence] = []
        for sequence in self._running:
            if budget == 0:
                return work
            work.append(self._chunk(sequence, budget))
            budget -= work[-1].num_tokens
        while self._queue and budget and len(self._running) < self._max_batch_sequences:
            if not self._take_pages(self._queue[0]):
                break
            sequence = self._queue.popleft()
            self._running.append(sequence)
            work.append(self._chunk(sequence, budget))
            budget -= work[-1].num_tokens
        return work

    @staticmethod
    def _chunk(sequence: Sequence, budget: int) -> ScheduledSequence:
        return ScheduledSequence(sequence, min(budget, sequence.num_uncomputed_tokens))

    def _take_pages(self, sequence: Sequence) -> bool:
        """All the prompt's pages, cached ones first; False, and nothing taken, where the pool has too few."""
        # At least one token is computed, since its logits give the first token.
        reusable = (len(sequence.token_ids) - 1) // self._page_size
        hashes = sequence.hash_full_pages(self._page_size)[:reusable]
        cached = self._cache.match(hashes)
        num_pages = -(-len(sequence.token_ids) // self._page_size)
        try:
            fresh = self._pool.allocate(num_pages - len(cached))
        except OutOfPages:
            self._pool.release(cached)
            return False
        sequence.pages = [*cached, *fresh]
        sequence.num_computed_tokens = self._cache.promote(hashes, sequence.pages, len(cached)) * self._page_size
        return True

    def commit(self, work: Seq[ScheduledSequence]) -> list[Sequence]:
        """Records a computed step and shares its full pages; returns the sequences whose prompt is complete."""
        complete = []
        for scheduled in work:
            sequence = scheduled.sequence
            draws = scheduled.draws
            num_shared = sequence.num_computed_tokens // self._page_size
            sequence.num_computed_tokens += scheduled.num_tokens
            num_full = sequence.num_computed_tokens // self._page_size
            self._cache.insert(sequence.page_hashes[:num_full], sequence.pages, start=num_shared)
            if draws:
                complete.append(sequence)
                self._running.remove(sequence)
        return complete
