"""Which sequences a decode step computes: admission, continuous batching, preemption, page reservations. Pure.

Every sequence that is running gets its next token first; what is left of the step's token budget goes to chunks of
prompts that are computed here. Sequences have a rank for their whole life: by arrival, interactive ones with a head
start before standard ones before bulk (penstock/aging.py). A sequence that needs a page when none is left preempts one
that ranks behind it, bulk first and then the one with least work to lose; its tokens are kept and its KV is computed
again later. So the first in rank always gets on, everybody comes to be first, and nobody starves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.page_pool import OutOfPages, PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.aging import Aging
from penstock.config import DecodeConfig
from penstock.types import Lane, PageHash, PageId

# Later arrivals that may go first.
HANDICAP_REQUESTS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 32, Lane.BULK: 256}


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence and what scheduling remembers of it."""

    sequence: Sequence
    rank: tuple[float, int]  # the second counts the order of arrival
    num_shared_pages: int = 0  # leading full pages already offered to the prefix cache
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a prompt that is computed elsewhere: leading ones already here, and those to be written."""

    held: list[PageId]
    fresh: list[PageId]


class DecodeScheduler:
    """Owns who runs and who waits. `schedule` and `commit` alternate; all on the step loop."""

    def __init__(self, pool: PagePool, cache: PrefixCache, page_size: int, config: DecodeConfig) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._config = config
        self._watermark_pages = int(config.watermark * pool.num_pages)
        self._entries: dict[Sequence, _Entry] = {}
        self._running: list[_Entry] = []  # by rank
        self._waiting: list[_Entry] = []  # by rank; to be computed here
        self._num_arrivals = 0
        self._aging = Aging(HANDICAP_REQUESTS)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of prompts (and of preempted sequences) that are to be computed here."""
        waiting = sum(entry.sequence.num_uncomputed_tokens for entry in self._waiting)
        return waiting + sum(entry.sequence.num_uncomputed_tokens - 1 for entry in self._running)

    def track(self, sequence: Sequence) -> None:
        """From now on the sequence has its rank."""
        self._num_arrivals += 1
        self._entries[sequence] = _Entry(sequence, (self._aging.rank(sequence.lane), self._num_arrivals))
        self._aging.advance(1)

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Of a tracked sequence; lower ones go first."""
        return self._entries[sequence].rank

    def compute_here(self, sequence: Sequence) -> None:
        """Queues a tracked sequence that holds no pages: all its tokens are computed by this worker."""
        assert not sequence.pages
        assert sequence.num_computed_tokens == 0
        bisect.insort(self._waiting, self._entries[sequence], key=_rank)

    def join(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """A tracked sequence whose pages hold the KV of its first `num_computed_tokens` tokens runs from now on."""
        entry = self._entries[sequence]
        sequence.num_computed_tokens = num_computed_tokens
        self._share_full_pages(entry)
        bisect.insort(self._running, entry, key=_rank)

    def is_running(self, sequence: Sequence) -> bool:
        """Whether it gets a token in every step: it runs, and the KV of all its tokens but the last is here."""
        entry = self._entries.get(sequence)
        return entry in self._running and sequence.num_uncomputed_tokens == 1

    def pause(self, sequence: Sequence) -> None:
        """A running sequence stands still and keeps its pages."""
        self._running.remove(self._entries[sequence])

    def resume(self, sequence: Sequence) -> None:
        """A paused one runs again."""
        bisect.insort(self._running, self._entries[sequence], key=_rank)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends here: whatever it holds goes back."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return
        if entry in self._running:
            self._running.remove(entry)
        elif entry in self._waiting:
            self._waiting.remove(entry)
        self.drop_pages(sequence)

    def drop_pages(self, sequence: Sequence) -> None:
        self._pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed_tokens = 0
        if sequence in self._entries:
            self._entries[sequence].num_shared_pages = 0

    def num_cached_tokens(self, sequence: Sequence) -> int:
        return self._entries[sequence].num_cached_tokens

    def num_preemptions(self, sequence: Sequence) -> int:
        return self._entries[sequence].num_preemptions

    def peek_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens at the start of the sequence that need no computing here."""
        return self._cache.peek(self._reusable_hashes(sequence, len(sequence.token_ids))) * self._page_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> Reservation | None:
        """Pages for a tracked sequence's first `num_tokens`, cached ones first; None where the pool has too few now.

        It may have fewer tokens yet. The caller owns the references. Sequences that wait to be computed here go first,
        or they would starve.
        """
        if self._waiting and self._waiting[0].rank < self._entries[sequence].rank:
            return None
        if self._num_holding() >= self._config.max_batch_sequences:
            return None
        pages = self._take_pages(sequence, num_tokens)
        if pages is None:
            return None
        num_held, taken = pages
        self._entries[sequence].num_cached_tokens = num_held * self._page_size
        return Reservation(taken[:num_held], taken[num_held:])

    def schedule(self) -> list[ScheduledSequence]:
        """The next step: each running sequence's next token, then chunks of prompts within the token budget."""
        budget = self._config.max_batch_tokens
        work: list[ScheduledSequence] = []
        num_waiting = len(self._waiting)
        # One token each first (decode), then chunks: a long prompt must not delay those already streaming.
        for entry in sorted(self._running, key=lambda item: (item.sequence.num_uncomputed_tokens > 1, item.rank)):
            num_tokens = min(budget, entry.sequence.num_uncomputed_tokens)
            if num_tokens == 0:
                break
            if entry not in self._running or not self._make_room(entry, num_tokens):
                continue
            work.append(ScheduledSequence(entry.sequence, num_tokens))
            budget -= num_tokens
        # A preemption may have hit a sequence that was scheduled before it in this very step.
        running = {entry.sequence for entry in self._running}
        work = [scheduled for scheduled in work if scheduled.sequence in running]
        if len(self._waiting) > num_waiting:
            return work  # pages are short: whoever was preempted does not come straight back
        while self._waiting and budget > 0 and self._num_holding() < self._config.max_batch_sequences:
            entry = self._waiting[0]
            if not self._admit(entry):
                break
            num_tokens = min(budget, entry.sequence.num_uncomputed_tokens)
            work.append(ScheduledSequence(entry.sequence, num_tokens))
            budget -= num_tokens
        return work

    def commit(self, work: Seq[ScheduledSequence], output: StepOutput) -> list[tuple[Sequence, SampledToken]]:
        """Records a computed step; returns each drawn token, already appended to its sequence."""
        drawn = []
        for scheduled, token in zip(work, output.tokens, strict=True):
            sequence = scheduled.sequence
            sequence.num_computed_tokens += scheduled.num_tokens
            self._share_full_pages(self._entries[sequence])
            if token is not None:
                sequence.token_ids.append(token.token_id)
                drawn.append((sequence, token))
        return drawn

    def _num_holding(self) -> int:
        """Sequences that hold pages: running, or with a transfer under way."""
        return sum(1 for entry in self._entries.values() if entry.sequence.pages)

    def _admit(self, entry: _Entry) -> bool:
        taken = self._take_pages(entry.sequence, len(entry.sequence.token_ids))
        if taken is None:
            return False
        num_held, entry.sequence.pages = taken
        entry.sequence.num_computed_tokens = num_held * self._page_size
        entry.num_shared_pages = num_held
        if entry.num_preemptions == 0:
            entry.num_cached_tokens = entry.sequence.num_computed_tokens
        self._waiting.remove(entry)
        bisect.insort(self._running, entry, key=_rank)
        return True

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> tuple[int, list[PageId]] | None:
        """(how many leading pages are cached, pages for `num_tokens`), a reference on each, or None."""
        hashes = self._reusable_hashes(sequence, num_tokens)
        held = self._cache.match(hashes)
        num_fresh = -(-num_tokens // self._page_size) - len(held)
        # With nobody running there is nobody to keep pages back for.
        keep = self._watermark_pages if self._running else 0
        if self._pool.num_available - num_fresh >= keep:
            try:
                pages = [*held, *self._pool.allocate(num_fresh)]
                return self._cache.promote(hashes, pages, len(held)), pages
            except OutOfPages:
                pass  # the reference on `held` made evictable pages unavailable: same as too few
        self._pool.release(held)
        return None

    def _reusable_hashes(self, sequence: Sequence, num_tokens: int) -> list[PageHash]:
        """Of the full pages before the last token, which is computed anew for its logits."""
        num_known = min(num_tokens, len(sequence.token_ids))
        return sequence.hash_full_pages(self._page_size)[: (num_known - 1) // self._page_size]

    def _make_room(self, entry: _Entry, num_tokens: int) -> bool:
        """Pages for the next `num_tokens`, preempting others where needed; False if it preempted itself."""
        sequence = entry.sequence
        num_pages = -(-(sequence.num_computed_tokens + num_tokens) // self._page_size)
        missing = num_pages - len(sequence.pages)
        while missing > 0:
            try:
                sequence.pages += self._pool.allocate(missing)
                return True
            except OutOfPages:
                victim = self._choose_victim(entry)
                self._preempt(victim)
                if victim is entry:
                    return False
        return True

    def _choose_victim(self, entry: _Entry) -> _Entry:
        """Who makes room for `entry`: one that ranks behind it, or itself where there is none."""
        behind = self._running[bisect.bisect_right(self._running, entry.rank, key=_rank) :]

        def cost(one: _Entry) -> tuple[bool, int, float]:
            return one.sequence.lane is not Lane.BULK, one.sequence.num_computed_tokens, -one.rank[1]

        return min(behind, key=cost, default=entry)

    def _preempt(self, entry: _Entry) -> None:
        self._running.remove(entry)
        self.drop_pages(entry.sequence)
        entry.num_preemptions += 1
        bisect.insort(self._waiting, entry, key=_rank)

    def _share_full_pages(self, entry: _Entry) -> None:
        sequence = entry.sequence
        num_full = sequence.num_computed_tokens // self._page_size
        if num_full > entry.num_shared_pages:
            hashes = sequence.hash_full_pages(self._page_size)
            self._cache.insert(hashes[:num_full], sequence.pages, start=entry.num_shared_pages)
            entry.num_shared_pages = num_full


def _rank(entry: _Entry) -> tuple[float, int]:
    return entry.rank
