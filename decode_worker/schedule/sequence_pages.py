"""Allocates the pages of sequences, offers full ones to the prefix cache, and reclaims those behind a window. Pure.

The decode scheduler calls it. It knows how much of each sequence was offered to the prefix cache. The pool owns the
pages, and `decode_worker.schedule.steps_in_flight` decides when they return to it.

If pages have two parts (`engine.cache.windows.window_parts`), a sequence has all its pages, but the windowed parts of
only those that its next chunk writes and those in the window before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from engine.cache.page_pool import OutOfPages, PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence, hash_one_more_page
from penstock.types import PageHash, PageId
from worker.pull.pulled_pages import num_tokens_to_pulled, take_pulled_pages


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages for the beginning of a sequence, as `Sequence.pages` holds them."""

    pages: list[PageId]
    num_filled: int  # leading pages that need not be computed
    num_dropped: int  # of these, entries without a page
    num_found: int  # of these, pages that the cache vouches for; pages that nothing will read are left out
    num_stripped: int = 0  # leading entries without a windowed part, and `num_attached` those before its end
    num_attached: int = 0


class SequencePages:
    """Manages pages of `page_size` tokens. Adds every page that a row gets to `rows`."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache, page_size: int, rows: RowTable, max_chunk_tokens: int
    ) -> None:
        """`max_chunk_tokens` is the most that a step computes of one sequence."""
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._rows = rows
        self._max_chunk_tokens = max_chunk_tokens
        self._num_shared: dict[Sequence, int] = {}  # leading full pages already offered to the prefix cache
        self._whole: set[Sequence] = set()  # sequences that keep pages behind the window

    # Prompts.

    def peek(self, sequence: Sequence) -> int:
        """Returns how many leading pages need not be computed here."""
        return self._cache.peek(sequence.reusable_hashes(self._page_size))

    def num_initial(self, sequence: Sequence) -> int:
        """Returns how many pages `allocate` would take for the sequence's tokens if none were cached."""
        return self._num_at_first(len(sequence.token_ids), 0, 0, 0)

    def allocate(
        self,
        sequence: Sequence,
        num_tokens: int,
        num_kept_back: int,
        num_landing: int | None = None,
        num_unneeded: int = 0,
    ) -> PageGrant | None:
        """Returns referenced pages for `num_tokens`, or for as many of them as a window lets the sequence hold.

        With `num_landing`, that many leading tokens get their KV from elsewhere, except in the first `num_unneeded`
        pages, which nothing will read. Looks for cached pages among those tokens, by default among all. Returns None
        and allocates nothing if fewer than `num_kept_back` pages would be left in the pool.
        """
        hashes = sequence.reusable_hashes(self._page_size, num_tokens if num_landing is None else num_landing)
        cached = self._cache.match(hashes, num_unneeded)
        num_dropped = self._cache.first_needed(len(cached), num_unneeded)
        num_fresh = self._num_at_first(num_tokens, len(cached), num_dropped, num_landing or 0) - len(cached)
        windowed = self._windowed_range(sequence, num_tokens, len(cached), num_landing)
        first_found = len(cached) - len(self._cache.windowed(cached))
        self._pool.release((), cached[first_found : windowed.start])
        has_slots = self._has_slots(windowed, len(cached), num_kept_back)
        if has_slots and self._pool.num_available - num_fresh >= num_kept_back:
            try:
                pages = [*cached, *self._pool.allocate(num_fresh)]
                grant = self._fill(sequence.tenant, hashes, pages, len(cached), num_dropped, num_unneeded)
                self._cache.note_found_texts(sequence, hashes[: grant.num_filled])
                return self._attach_first(grant, windowed)
            except OutOfPages:
                pass  # the references on `cached` made evictable pages unavailable: too few again
        self._pool.release(cached[num_dropped:], cached[windowed.start : windowed.stop])
        return None

    def _windowed_range(self, sequence: Sequence, num_tokens: int, num_cached: int, num_landing: int | None) -> range:
        """Returns the indexes of the pages that have a windowed part at first: those that later tokens read, and those
        that the first chunk, or a transfer, writes.
        """
        parts = self._pool.parts
        if parts is None:
            return range(0)
        total, landing = -(-num_tokens // self._page_size), 0
        first = parts.first_needed(num_cached)
        if num_landing is not None:
            # A migrating sequence has fewer tokens so far, and computes its last one here.
            first = parts.window.num_behind(min(num_landing, len(sequence.token_ids)) - 1)
            landing = -(-num_landing // self._page_size)
        most_held = parts.window.max_pages(num_tokens, self._max_chunk_tokens)
        return range(first, max(landing, min(total, first + most_held)))

    def _has_slots(self, windowed: range, num_cached: int, num_kept_back: int) -> bool:
        parts = self._pool.parts
        if parts is None:
            return True
        num_slots_kept_back = num_kept_back * parts.num_slots // self._pool.num_pages
        num_fresh = windowed.stop - max(windowed.start, num_cached)
        return parts.num_available - num_fresh >= num_slots_kept_back

    def _attach_first(self, grant: PageGrant, windowed: range) -> PageGrant:
        """Gives the grant the windowed parts of fresh pages in `windowed`, which is empty if pages are whole."""
        if self._pool.parts is None:
            return grant
        self._pool.parts.attach(grant.pages[max(windowed.start, grant.num_filled) : windowed.stop])
        return replace(grant, num_stripped=windowed.start, num_attached=windowed.stop)

    def _fill(
        self,
        tenant: str,
        hashes: list[PageHash],
        pages: list[PageId],
        num_cached: int,
        num_dropped: int,
        num_unneeded: int,
    ) -> PageGrant:
        """Fills pages from lower tiers. Gives back the pages that are then behind the window, some of which were never
        filled.
        """
        num_filled = self._cache.promote(hashes, pages, num_cached, num_unneeded, owner=tenant)
        first_needed = self._cache.first_needed(num_filled, num_unneeded)
        self._pool.release(pages[num_dropped:first_needed])
        pages[num_dropped:first_needed] = [PageId(0)] * (first_needed - num_dropped)
        return PageGrant(pages, num_filled, first_needed, num_filled - num_unneeded)

    def _num_at_first(self, num_tokens: int, num_cached: int, num_dropped: int, num_landing: int) -> int:
        """Returns how many leading entries a sequence of `num_tokens` has before its first step."""
        total, landing = -(-num_tokens // self._page_size), -(-num_landing // self._page_size)
        if (sinks := self._cache.sinks) is not None:
            num_entries = sinks.num_first_entries(num_tokens, num_cached, self._max_chunk_tokens)
            return min(total, max(num_entries, landing, num_cached))
        if self._cache.window.tokens is None:
            return total
        most_held = self._cache.window.max_pages(num_tokens, self._max_chunk_tokens)
        return min(total, max(num_dropped + most_held, landing, num_cached))

    def hold(self, sequence: Sequence, grant: PageGrant) -> None:
        """Gives allocated pages to the sequence; the rest of its tokens is computed next."""
        sequence.pages, sequence.num_dropped = grant.pages, grant.num_dropped
        sequence.num_stripped, sequence.num_attached = grant.num_stripped, grant.num_attached
        sequence.num_computed_tokens = grant.num_filled * self._page_size
        self._num_shared[sequence] = grant.num_filled

    def drop(self, sequence: Sequence) -> None:
        """Takes the sequence's pages from it; the caller returns them to the pool."""
        sequence.pages, sequence.num_dropped = [], 0
        sequence.num_stripped = sequence.num_attached = 0
        sequence.num_computed_tokens = 0
        self._num_shared.pop(sequence, None)
        self._whole.discard(sequence)

    # Pulls that go on while a prompt is computed.

    def take_pulled(self, sequence: Sequence) -> int:
        """Lets a prompt that no step in flight computes continue with pages that were pulled meanwhile. Returns how
        many tokens it need not compute.
        """
        num_tokens = take_pulled_pages(sequence, self._cache, self._page_size)
        if num_tokens:
            self._num_shared[sequence] = sequence.num_computed_tokens // self._page_size
        return num_tokens

    def num_to_pulled(self, sequence: Sequence, start: int) -> int:
        """Returns how many tokens from `start` on to compute before such pages, or the end of the sequence."""
        return num_tokens_to_pulled(sequence, start, self._cache, self._page_size)

    # The window.

    def keep_whole(self, sequence: Sequence, *, keeps: bool) -> None:
        """Sets whether the sequence keeps its pages even behind the window."""
        if keeps:
            self._whole.add(sequence)
        else:
            self._whole.discard(sequence)

    def drop_behind(self, sequence: Sequence) -> list[PageId]:
        """Takes the pages that no later token of the sequence reads; the caller returns them to the pool, like those of
        `strip_behind`.
        """
        sinks, num_sinks = self._cache.sinks, 0
        if sinks is None:
            stop = self._cache.window.num_behind(sequence.num_computed_tokens)
        else:
            num_sinks, stop = sinks.num_sink_pages, sinks.gap(sequence.num_computed_tokens).stop
        first = max(sequence.num_dropped, num_sinks)
        if stop <= first or sequence in self._whole:
            return []
        self._rows.drop_pages(sequence, first, stop)
        return sequence.drop_pages(stop, num_sinks)

    def strip_behind(self, sequence: Sequence) -> list[PageId]:
        """Takes the windowed parts that no later token of the sequence reads, and returns their pages."""
        if self._pool.parts is None or sequence in self._whole:
            return []
        return sequence.strip_pages(self._pool.parts.window.num_behind(sequence.num_computed_tokens))

    # Growth.

    def num_missing(self, chunk: ScheduledSequence) -> int:
        """Returns how many more pages the sequence needs to compute the chunk."""
        return max(0, self._num_pages(chunk) - len(chunk.sequence.pages))

    def _num_pages(self, chunk: ScheduledSequence) -> int:
        return -(-(chunk.start + chunk.num_positions) // self._page_size)

    def _num_unattached(self, chunk: ScheduledSequence) -> int:
        """Returns how many more windowed parts the sequence needs to compute the chunk."""
        return max(0, self._num_pages(chunk) - chunk.sequence.num_attached) if self._pool.parts is not None else 0

    def has_room(self, sequences: Collection[Sequence], chunks: Collection[ScheduledSequence] = ()) -> bool:
        """Returns whether each of `sequences` can be extended by a page, and each of `chunks` by what it lacks."""
        num_pages = sum([_needs_page(sequence) for sequence in sequences])
        num_pages += sum([self.num_missing(chunk) for chunk in chunks])
        parts = self._pool.parts
        if num_pages > self._pool.num_available or parts is None:
            return num_pages <= self._pool.num_available
        return len(sequences) + sum([self._num_unattached(chunk) for chunk in chunks]) <= parts.num_available

    def extend(self, chunk: ScheduledSequence) -> None:
        """Allocates the chunk's missing pages and windowed parts. Raises OutOfPages, and then allocates nothing."""
        sequence, missing, num_unattached = chunk.sequence, self.num_missing(chunk), self._num_unattached(chunk)
        if (missing or num_unattached) and sequence in self._rows:
            self.extend_rows([sequence])
            return
        if not self.has_room((), [chunk]):
            raise OutOfPages(missing, self._pool.num_available)
        if missing:
            sequence.pages += self._pool.allocate(missing)
        if num_unattached:
            self._attach(sequence, num_unattached)

    def _attach(self, sequence: Sequence, count: int) -> None:
        """Gives the sequence's next `count` pages their windowed parts."""
        assert self._pool.parts is not None
        first = sequence.num_attached
        self._pool.parts.attach(sequence.pages[first : first + count])
        sequence.num_attached += count

    def extend_rows(self, sequences: list[Sequence]) -> None:
        """Allocates one page for each row, which is enough for one token per step. Raises OutOfPages."""
        if not sequences:
            return
        if not self.has_room(sequences):
            raise OutOfPages(len(sequences), self._pool.num_available)
        lacking = [sequence for sequence in sequences if _needs_page(sequence)]
        for sequence, page in zip(lacking, self._pool.allocate(len(lacking)), strict=True):
            sequence.pages.append(page)
        if self._pool.parts is not None:
            for sequence in sequences:
                self._attach(sequence, 1)
        self._rows.add_pages(sequences, [sequence.pages[sequence.num_usable_pages - 1] for sequence in sequences])

    def extend_rows_by(self, num_steps: int) -> None:
        """Allocates the pages that rows lack for `num_steps` more steps. Raises OutOfPages."""
        missing = self._rows.num_missing_pages(num_steps)
        lacking = missing.nonzero()[0].tolist()
        pages = self._pool.allocate(int(missing.sum()))
        for row in lacking:
            sequence = self._rows.at(row)
            for _ in range(int(missing[row])):
                page = pages.pop()
                sequence.pages.append(page)
                self._rows.add_pages([sequence], [page])

    # Sharing.

    def share_full(self, sequence: Sequence) -> None:
        """Offers the sequence's fully computed pages to the prefix cache if that is enabled."""
        if not self._cache.enabled:
            return
        num_full = sequence.num_computed_tokens // self._page_size
        num_shared = max(self._num_shared.get(sequence, 0), sequence.num_dropped)
        if num_full > num_shared:
            hashes = sequence.hash_full_pages(self._page_size)
            self._cache.note_texts(sequence, hashes[:num_full], num_shared)
            self._cache.insert(hashes[:num_full], sequence.pages, num_shared, sequence.tenant)
            self._num_shared[sequence] = num_full

    def share_filled(self, sequences: Iterable[Sequence]) -> None:
        """Does the same as `share_full`, at once for many sequences that have just filled a page."""
        if not self._cache.enabled:
            return
        plain: list[Sequence] = []
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // self._page_size
            if len(sequence.page_hashes) == self._num_shared.get(sequence, 0) == num_full - 1:
                self._num_shared[sequence] = num_full
                plain.append(sequence)
            else:
                self.share_full(sequence)
        if plain:
            hash_one_more_page(plain, self._page_size)
            for sequence in plain:
                self._cache.note_texts(sequence, sequence.page_hashes, len(sequence.page_hashes) - 1)
            self._cache.insert_last([(sequence.page_hashes, sequence.pages, sequence.tenant) for sequence in plain])


def _needs_page(sequence: Sequence) -> bool:
    """Returns whether a row has no page after those that it may write, not even one without a windowed part."""
    return sequence.num_usable_pages == len(sequence.pages)
