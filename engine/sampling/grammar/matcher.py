"""Follows one sequence through its grammar: which tokens may come next, and which ones must.

A matcher reads the output tokens that were appended to the sequence since its last call, so it needs no notifications,
and a token that was sampled and then discarded is never read. Its callers never overlap: first the step that samples
the sequence, then the step loop that records the token.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np
from llguidance import LLMatcher

from penstock.errors import InvalidInput, PenstockError
from penstock.text.grammars import FIELD
from penstock.types import SamplingParams

_MAX_PROBLEM = 200


class GrammarMatcher:
    """Belongs to one sequence; nothing is carried over when the sequence moves."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Collection[int]) -> None:
        """`matcher` is at the grammar's start; this object takes it over."""
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_read = 0

    @property
    def library_matcher(self) -> LLMatcher:
        """llguidance's matcher, for computing several masks at once; valid until the next call of a method."""
        return self._matcher

    def read(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        """Reads the output tokens that are new. Raises PenstockError if they leave the grammar."""
        fresh = token_ids[num_prompt_tokens + self._num_read :]
        if fresh and fresh[-1] in self._eos_token_ids:
            fresh = fresh[:-1]  # this token ends the output, whether or not the grammar contains it
        if not fresh:
            return
        self._num_read += len(fresh)
        if not self._matcher.consume_tokens(list(fresh)):
            raise self._failure()

    def amend(self, words: np.ndarray, num_output_tokens: int, sampling: SamplingParams) -> None:
        """Corrects the mask that llguidance has computed (`words`, int32, a bit for each token) in place.

        llguidance allows an end-of-sequence token exactly where the grammar accepts the output; here the request's own
        stop tokens are allowed there too. With `ignore_eos`, and before `min_tokens`, what would end the output is
        allowed only where nothing else is. Raises PenstockError if llguidance has given up.
        """
        if self._matcher.is_error():
            raise self._failure()
        if sampling.stop_token_ids and self._matcher.is_accepting():
            _set_bits(words, sampling.stop_token_ids)
        ending = self._eos_token_ids if sampling.ignore_eos else frozenset[int]()
        if num_output_tokens < sampling.min_tokens:
            ending = self._eos_token_ids.union(sampling.stop_token_ids)
        if ending:
            others = words & _all_but(ending, words.size)
            if others.any():
                words[:] = others

    def forced(self, token_ids: Seq[int], num_prompt_tokens: int) -> list[int]:
        """Returns the tokens that must follow the output tokens; the last may be the one that ends the sequence.

        It reads them too: the caller appends them, up to where the sequence ends. Raises PenstockError like `read`.
        """
        self.read(token_ids, num_prompt_tokens)
        if token_ids[-1] in self._eos_token_ids:
            return []
        found: list[int] = []
        while not self._matcher.is_stopped() and (fresh := self._matcher.compute_ff_tokens()):
            found += fresh
            self._num_read += len(fresh)
            if not self._matcher.consume_tokens(fresh):
                break
        if self._matcher.is_error():
            raise self._failure()
        if self._matcher.is_stopped():
            found.append(min(self._eos_token_ids))
        return found

    def _failure(self) -> PenstockError:
        problem = " ".join(self._matcher.get_error().split("<state>")[0].split())[:_MAX_PROBLEM]
        return InvalidInput(FIELD, f"cannot be followed after {self._num_read} tokens: {problem}; simplify it")


def _set_bits(words: np.ndarray, token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < words.size * 32:
            words.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


@functools.lru_cache(maxsize=64)
def _all_but(token_ids: frozenset[int], num_words: int) -> np.ndarray:
    """Returns the mask of all tokens but these. It is shared: read it only."""
    words = np.full(num_words, -1, np.int32)
    for token_id in token_ids:
        if token_id < num_words * 32:
            words.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
    return words
