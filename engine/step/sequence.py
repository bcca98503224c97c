"""Defines a running generation as the engine sees it, and what one step returns for it.

A `Sequence` is owned by exactly one scheduler, and only that scheduler changes it. The engine reads it: `Engine.step`
takes `ScheduledSequence`s and returns a `StepOutput`, and mutates neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.step.prompt_scores import PromptScores
from penstock.kv.adapter_files import AdapterRef
from penstock.kv.kv_hints import NO_KV_HINTS, KvHints
from penstock.kv.page_hash import hash_next_pages, hash_pages
from penstock.types import Lane, PageHash, PageId, RequestId, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from engine.sampling.grammar.matcher import GrammarMatcher
    from engine.sampling.text_edits import TextEdits


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one generation and the pages that hold their KV.

    Invariant: `num_computed_tokens < len(token_ids)` between steps, and `pages` holds at least
    `ceil(num_computed_tokens / page_size)` pages. The KV of token i is in `pages[i // page_size]`, except that the
    first `num_dropped` entries, but for the first `num_sinks`, stand for pages that lie behind the window and were
    released: they are 0, as in a page table, and attention ignores what is there.

    If pages have two parts (`engine.cache.windows.window_parts`), it holds the windowed part of `pages[num_stripped :
    num_attached]`, which are those of all computed tokens that later ones read. Otherwise both are 0.
    """

    request_id: RequestId
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams
    salt: bytes  # root of the page hashes
    pages: list[PageId] = field(default_factory=list)
    num_dropped: int = 0
    num_sinks: int = 0  # pages that it keeps before the dropped ones; set with the first of these
    num_stripped: int = 0
    num_attached: int = 0
    page_hashes: list[PageHash] = field(default_factory=list)  # of leading full pages, grown by `hash_full_pages`
    lane: Lane = Lane.STANDARD  # its priority class, for schedulers and links
    is_decoding: bool = False  # all tokens but the last have their KV; `_num_prefilled` is not kept while this holds
    matcher: GrammarMatcher | None = None  # of `sampling.grammar`; set before the sequence is scheduled
    edits: TextEdits | None = None  # what `sampling` does to its logits; set by the first step that samples
    tenant: str = ""  # whose pages it caches
    kv_hints: KvHints = NO_KV_HINTS  # applied at its end
    adapter: AdapterRef | None = None
    adapter_slot: int = 0  # of `adapter`, at this worker; set before the sequence is scheduled
    _num_prefilled: int = 0  # leading tokens with KV, unless `is_decoding`

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in `pages`."""
        return len(self.token_ids) - 1 if self.is_decoding else self._num_prefilled

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: int) -> None:
        self.is_decoding, self._num_prefilled = False, number

    def start_decoding(self) -> None:
        """Declares that from now on every token but the last has its KV, so that appending a token also counts one as
        computed.
        """
        assert self.num_uncomputed_tokens == 1
        self.is_decoding = True

    def append_uncomputed(self, token_ids: Collection[int]) -> None:
        """Appends tokens whose KV is yet to be computed; the sequence no longer counts as decoding."""
        self.is_decoding, self._num_prefilled = False, self.num_computed_tokens
        self.token_ids += token_ids

    @property
    def held_pages(self) -> list[PageId]:
        """The pages that it holds a reference to, in order."""
        first = self.pages[: self.num_sinks] if self.has_gap else []
        return first + self.pages[self.num_dropped :]

    @property
    def has_gap(self) -> bool:
        """Returns whether it has dropped pages behind ones that it holds."""
        return 0 < self.num_sinks < self.num_dropped

    @property
    def num_usable_pages(self) -> int:
        """Returns how many leading entries of `pages` have room for tokens in every layer, or lie behind the window."""
        return self.num_attached or len(self.pages)

    @property
    def windowed_pages(self) -> list[PageId]:
        """Returns the pages whose windowed part it holds, in order."""
        return self.pages[self.num_stripped : self.num_attached]

    def strip_pages(self, num_stripped: int) -> list[PageId]:
        """Strips that many leading pages and returns those whose windowed part it still held; the caller releases
        them.
        """
        stripped = self.pages[self.num_stripped : num_stripped]
        self.num_stripped = max(self.num_stripped, num_stripped)
        return stripped

    def drop_pages(self, num_dropped: int, num_sinks: int = 0) -> list[PageId]:
        """Drops that many leading pages, but for the first `num_sinks`, and returns those it still held; the caller
        releases them.
        """
        first = max(self.num_dropped, num_sinks)
        dropped = self.pages[first:num_dropped]
        if dropped:
            self.pages[first:num_dropped] = [PageId(0)] * len(dropped)
            self.num_dropped, self.num_sinks = first + len(dropped), num_sinks
        return dropped

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_fast_forwarding(self) -> bool:
        """Returns whether only output tokens lack their KV, but more than the last one, because a grammar forced them
        or the sequence is being recomputed.
        """
        return self.matcher is not None and self.num_prompt_tokens <= self.num_computed_tokens < len(self.token_ids) - 1

    @property
    def sampling_needs_text(self) -> bool:
        """Returns whether its next token can be scheduled only once the host knows every token before it.

        With only a few allowed tokens, bad sequences may ban all of them, and that error names the position.
        """
        return bool(self.sampling.bad_sequences and self.sampling.allowed_token_ids)

    def continued(self, token_ids: Collection[int]) -> Sequence:
        """Returns a copy with more tokens, whose next token can be sampled; it has no pages and no grammar."""
        return Sequence(
            self.request_id, [*self.token_ids, *token_ids], self.num_prompt_tokens, self.sampling, self.salt
        )

    @property
    def scores_prompt(self) -> bool:
        """Returns whether log-probabilities of its prompt are still to be sent, which happens with the first token."""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    def hash_full_pages(self, page_size: int) -> list[PageHash]:
        """Returns the hashes of all full pages of `token_ids`, each computed once."""
        if len(self.token_ids) >= (len(self.page_hashes) + 1) * page_size:
            self.page_hashes = hash_pages(self.token_ids, page_size, self.salt, self.page_hashes)
        return self.page_hashes

    def reusable_hashes(self, page_size: int, num_tokens: int | None = None) -> list[PageHash]:
        """Returns the hashes of the full pages of the first `num_tokens`, by default all, that may come from a cache.

        The last token is computed for its logits. There are none if the logits of every token of the prompt are needed.
        """
        if self.scores_prompt:
            return []
        num_known = len(self.token_ids) if num_tokens is None else min(num_tokens, len(self.token_ids))
        return self.hash_full_pages(page_size)[: (num_known - 1) // page_size]

    def hashes_for(self, page_size: int, own_page_size: int) -> list[PageHash]:
        """Returns the hashes of all full pages of another worker's `page_size`; only those of `own_page_size`, this
        worker's, are kept.
        """
        if page_size == own_page_size:
            return self.hash_full_pages(page_size)
        return hash_pages(self.token_ids, page_size, self.salt)


def hash_one_more_page(sequences: Collection[Sequence], page_size: int) -> None:
    """Appends the hash of the next full page to each sequence, in one call and without copying any chain of hashes."""
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
    """A request to compute the KV of the next `num_tokens` tokens and, if they are the last ones, to sample another.

    `1 <= num_tokens <= sequence.num_uncomputed_tokens`, and the sequence's pages already have room for them.
    """

    sequence: Sequence
    num_tokens: int
    fixed_start: int | None = None  # set for a chunk scheduled while an in-flight step computes the tokens before it
    # Tokens that may follow the sequence's last one, which the step verifies: see `engine.step.speculation`.
    proposed: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Position of the first token to compute; valid until the step is recorded."""
        return self.sequence.num_computed_tokens if self.fixed_start is None else self.fixed_start

    @property
    def num_contexts(self) -> float:
        """Number of earlier tokens that attention reads, summed over the tokens to compute; valid like `start`."""
        return self.num_positions * (self.start + self.num_positions / 2)

    @property
    def is_sampled(self) -> bool:
        """Returns whether the step reaches the end of the text and samples the next token; valid like `start`."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_positions(self) -> int:
        """Number of positions whose KV the step writes."""
        return self.num_tokens + len(self.proposed)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None  # present if sampling.logprobs asks for it


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Has one entry per scheduled sequence, in order; None for a chunk that does not reach the end of its text."""

    tokens: tuple[SampledToken | None, ...]
    scores: Mapping[int, PromptScores] = field(default_factory=dict)  # by place in the list of scheduled sequences
