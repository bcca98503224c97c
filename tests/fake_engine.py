"""A model whose KV can be checked: each position holds a digest of the tokens up to it.

`FakeEngine.step` fails on any page that does not hold exactly what its sequence's tokens say, so a stale, reused or
half-written page cannot go unnoticed. The next token depends on the tokens alone, as with a real model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import SampledToken, ScheduledSequence, StepOutput
from penstock.types import PageId

VOCAB_SIZE = 500
EOS = 7


@dataclass(frozen=True)
class FakeLayout:
    page_size: int
    page_bytes: int = 64


@dataclass(frozen=True)
class FakeModel:
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset({EOS})
    context_length: int = 1000


def next_token(token_ids: Seq[int]) -> int:
    return (hash(tuple(token_ids)) >> 7) % VOCAB_SIZE


class FakeEngine:
    """Stands in for `engine.engine.Engine` in tests of the workers' control flow."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.layout = FakeLayout(page_size)
        self.model = FakeModel()
        self.pool = PagePool(num_pages)
        self.prefix_cache = PrefixCache(self.pool, page_size)
        self.kv_pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]

    def step(self, work: Seq[ScheduledSequence]) -> StepOutput:
        drawn: list[SampledToken | None] = []
        for scheduled in work:
            sequence = scheduled.sequence
            start = sequence.num_computed_tokens
            for position in range(start + scheduled.num_tokens):
                digest = hash(tuple(sequence.token_ids[: position + 1]))
                page, offset = sequence.pages[position // self.layout.page_size], position % self.layout.page_size
                if position < start:
                    assert self.kv_pages[page][offset] == digest, f"page {page} holds another KV at {position}"
                else:
                    self.kv_pages[page][offset] = digest
            drawn.append(SampledToken(next_token(sequence.token_ids)) if scheduled.draws else None)
        return StepOutput(tuple(drawn))

    def read(self, pages: Seq[PageId]) -> list[list[int | None]]:
        return [list(self.kv_pages[page]) for page in pages]
