"""A running generation as the engine sees it, and what one step says about it.

A `Sequence` is owned by exactly one scheduler, which alone changes it (`append`, `pages`, `num_computed_tokens`). The
engine only reads it: `Engine.step` takes `ScheduledSequence`s and returns `StepOutput`, and mutates neither.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.page_hash import hash_next_pages, hash_pages
from penstock.types import Lane, PageHash, PageId, RequestId, SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one generation and the pages that hold their KV.

    Invariant: `num_computed_tokens < len(token_ids)` between steps, and `pages` holds at least
    `ceil(num_computed_tokens / page_size)` pages. KV of token i stands in `pages[i // page_size]`.
    """

    request_id: RequestId
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams
    salt: bytes  # root of the page hashes
    pages: list[PageId] = field(default_factory=list)
    num_computed: int | None = 0  # see `num_computed_tokens`; None while all but the last are: then nobody counts
    page_hashes: list[PageHash] = field(default_factory=list)  # of leading full pages, grown by `hash_full_pages`
    lane: Lane = Lane.STANDARD  # what it competes with, for schedulers and links
    listener: int = 0  # whoever hears its tokens finds them by this number; the worker's to give

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in `pages`."""
        return len(self.token_ids) - 1 if self.num_computed is None else self.num_computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: int) -> None:
        self.num_computed = number

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def draws_by_text(self) -> bool:
        """Whether its next draw needs its tokens, or more than a token is wanted of it."""
        sampling = self.sampling
        return bool(
            sampling.has_penalties
            or sampling.logit_bias
            or sampling.logprobs is not None
            or self.num_output_tokens < sampling.min_tokens
        )

    def hash_full_pages(self, page_size: int) -> list[PageHash]:
        """Hashes of every full page of `token_ids`, computed once each."""
        if len(self.token_ids) >= (len(self.page_hashes) + 1) * page_size:
            self.page_hashes = hash_pages(self.token_ids, page_size, self.salt, self.page_hashes)
        return self.page_hashes


def hash_one_more_page(sequences: Collection[Sequence], page_size: int) -> None:
    """Of each, as while they decode: all at once, and nobody's chain is copied."""
    token_ids: list[int] = []
    parents: list[PageHash] = []
    for sequence in sequences:
        known = sequence.page_hashes
        token_ids += sequence.token_ids[len(known) * page_size : (len(known) + 1) * page_size]
        parents.append(known[-1] if known else PageHash(sequence.salt))
    for sequence, page_hash in zip(sequences, hash_next_pages(token_ids, page_size, parents), strict=True):
        sequence.page_hashes.append(page_hash)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute KV of the next `num_tokens` tokens; when they are the last ones, draw the token after them.

    `1 <= num_tokens <= sequence.num_uncomputed_tokens`, and the sequence's pages already hold room for them.
    """

    sequence: Sequence
    num_tokens: int
    first: int | None = None  # of these tokens, where a step under way computes those before it; else the next one

    @property
    def start(self) -> int:
        """Tokens of the sequence before these."""
        return self.sequence.num_computed_tokens if self.first is None else self.first

    @property
    def num_contexts(self) -> float:
        """Over the tokens to compute, the sum of those before each. Until the step is committed."""
        return self.num_tokens * (self.start + self.num_tokens / 2)

    @property
    def draws(self) -> bool:
        """Until the step is committed."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None  # where sampling.logprobs asks for it


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry for each scheduled sequence, in order; None where a chunk did not reach the sequence's end."""

    tokens: tuple[SampledToken | None, ...]
