"""Provides a model whose KV can be checked: each position holds a digest of the tokens up to it.

`FakeEngine.step` fails on any page that does not match its sequence's tokens, so a stale, reused or half-written page
is noticed. The next token depends only on the tokens, as with a real model. With a window, pages behind it are not
checked, and `most_held` records the most pages that a sequence has held. With slots, only windowed layers have that
window: each position also has a digest in its page's windowed part, and only there those behind the window are not
checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.cache.page_slots import PageSlots
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tiers import CacheTiers
from engine.cache.windows.page_window import PageWindow
from engine.cache.windows.window_parts import WindowParts
from engine.step.compute import StepTokens
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from penstock.types import FinishReason, PageId

VOCAB_SIZE = 500
EOS = 7
CONTEXT = 64  # the window of the workers whose streams `expected_tokens` predicts


@dataclass(frozen=True)
class FakeLayout:
    page_size: int
    page_bytes: int = 64
    layers: range = range(2)


@dataclass(frozen=True)
class FakeModel:
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset({EOS})
    context_length: int = 1000


def next_token(token_ids: Seq[int]) -> int:
    return (hash(tuple(token_ids)) >> 7) % VOCAB_SIZE


def expected_tokens(prompt: list[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    tokens = list(prompt)
    while len(tokens) < min(CONTEXT, len(prompt) + max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


class FakeHost:
    """Stands in for `engine.cache.host_tier.HostTier`; there is no disk below it."""

    def __init__(self, kv_pages: list[list[int | None]], num_pages: int) -> None:
        self.slots = PageSlots(num_pages)
        self.bounce = memoryview(b"")
        self._kv_pages = kv_pages
        self._kept: list[list[int | None]] = [[] for _ in range(num_pages)]

    def write(self, slots: Seq[int], pages: Seq[PageId]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._kept[slot] = list(self._kv_pages[page])

    def read(self, slots: Seq[int], pages: Seq[PageId]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._kv_pages[page][:] = self._kept[slot]

    def wipe(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._kept[slot] = []

    def read_bounce(self, page: PageId) -> None:
        raise AssertionError("there is no disk")

    def settle(self) -> None:
        raise AssertionError("there is no disk")

    def content(self, slot: int) -> memoryview:
        raise AssertionError("there is no disk")


class PendingStep:
    """Represents a launched step; until it is waited for, its pages must not be allocated again."""

    def __init__(self, output: StepOutput, pages: set[PageId], in_flight: list[set[PageId]]) -> None:
        self._output, self._pages, self._in_flight = output, pages, in_flight
        in_flight.append(pages)

    def wait(self) -> StepTokens:
        assert self._in_flight.pop(0) is self._pages, "steps end in order"
        return StepTokens(np.array([], np.int64), [token and token.token_id for token in self._output.tokens])


class FakeEngine:
    """Stands in for `engine.engine.Engine` in tests of the workers' control flow."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        window: int | None = None,
        num_slots: int | None = None,
    ) -> None:
        self.layout = FakeLayout(page_size)
        self.model = FakeModel()
        self.runs_ahead = False
        self.in_flight: list[set[PageId]] = []
        self.kv_pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        tiers = CacheTiers(FakeHost(self.kv_pages, num_host_pages)) if num_host_pages else None
        self.window_kv: list[list[int | None]] = []
        parts = None
        if num_slots is not None:
            assert window is not None
            parts = WindowParts(num_pages, num_slots, PageWindow(window, page_size))
            self.window_kv, tiers = [[None] * page_size for _ in range(num_slots)], None
        window = window if parts is None else None
        self.prefix_cache = PrefixCache(num_pages, page_size, tiers=tiers, window=window, parts=parts)
        self.pool = self.prefix_cache.pool
        self._allocate, self.pool.allocate = self.pool.allocate, self.allocate  # type: ignore[method-assign]
        self.window = window
        self.most_held = 0  # the most pages that a sequence held when a step began

    def allocate(self, num_pages: int) -> list[PageId]:
        pages = self._allocate(num_pages)
        assert not any(set(pages) & written for written in self.in_flight), "an in-flight step may still write it"
        return pages

    def launch(self, work: Seq[ScheduledSequence], on_layer: object = None) -> PendingStep:
        """Computes the step at once, as later work on a device would see it."""
        pages = {page for scheduled in work for page in scheduled.sequence.held_pages}
        return PendingStep(self.step(work), pages, self.in_flight)

    def step(self, work: Seq[ScheduledSequence]) -> StepOutput:
        tokens: list[SampledToken | None] = []
        for scheduled in work:
            sequence = scheduled.sequence
            start = sequence.num_computed_tokens
            self.most_held = max(self.most_held, len(sequence.held_pages))
            assert len(set(sequence.held_pages)) == len(sequence.held_pages)
            for position, page, offset in self.places(sequence, start, scheduled.num_tokens):
                digest, held = hash(tuple(sequence.token_ids[: position + 1])), self.content(page)
                if position < start:
                    assert held[offset] == digest, f"page {page} holds another KV at {position}"
                else:
                    held[offset] = digest
            tokens.append(SampledToken(next_token(sequence.token_ids)) if scheduled.is_sampled else None)
        return StepOutput(tuple(tokens))

    def places(self, sequence: Sequence, start: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yields the positions that a chunk reads and writes, each with its page, or the inverted slot of that page's
        windowed part, and its place there.
        """
        size, parts = self.layout.page_size, self.pool.parts
        for position in range(self.first_read(start), start + num_tokens):
            yield position, sequence.pages[position // size], position % size
        if parts is not None:
            for position in range(max(0, start - parts.window.tokens + 1), start + num_tokens):
                slot = int(parts.slot_of_P[sequence.pages[position // size]])
                assert slot >= 0, f"{sequence.request_id} lacks a windowed part at {position} of {start}"
                yield position, ~slot, position % size

    def content(self, page: int) -> list[int | None]:
        """Returns what a page holds or, for an inverted slot, a windowed part."""
        return self.kv_pages[page] if page >= 0 else self.window_kv[~page]

    def first_read(self, position: int) -> int:
        """Returns the first position that a token at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def read(self, pages: Seq[PageId]) -> list[list[int | None]]:
        return [list(self.kv_pages[page]) for page in pages]
