"""Proposes the tokens that followed an earlier occurrence of the last tokens, in the prompt or in the output. Pure.

Code, answers that quote documents and other texts that copy from their prompt repeat long runs of tokens. The last
eight tokens are looked up first, then the last three, because a long match is right more often (Saxena, "Prompt Lookup
Decoding", 2023, also tries n-grams from long to short).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.step.sequence import Sequence as EngineSequence
from engine.step.speculation.proposal import Proposal, ProposalKind

LENGTHS = {ProposalKind.LONG_MATCH: 8, ProposalKind.SHORT_MATCH: 3}  # tokens that must match, tried in this order
_MAX_SLOTS = 1 << 15  # of an index: 128 KiB; later n-grams overwrite earlier ones
_MIN_SLOTS = 1 << 10
_MULTIPLIER = 0x9E3779B1  # 2^32 divided by the golden ratio (Knuth, TAOCP 3, 6.4)
_MASK = 0xFFFFFFFF
_BULK = 64  # from this many tokens on, numpy is faster than a loop


class _NgramIndex:
    """Maps each n-gram of a text to where it ended last. Slots may collide, so the tokens at the place are compared."""

    def __init__(self, length: int, num_slots: int) -> None:
        self._length = length
        self._shift = 33 - num_slots.bit_length()  # the upper bits of a hash are its best
        self._ends = np.zeros(num_slots, np.int32)  # where the n-gram of the slot ended; 0: none
        self._num_read = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Adds the n-grams that a token follows."""
        first, length = max(self._num_read, self._length), self._length
        self._num_read = len(token_ids)
        if len(token_ids) - first >= _BULK:
            text = np.array(token_ids[first - length : -1], np.uint64)
            hashes = np.zeros(len(text) - length + 1, np.uint64)
            for place in range(length):
                hashes = (hashes + text[place : place + len(hashes)]) * np.uint64(_MULTIPLIER) & np.uint64(_MASK)
            self._ends[(hashes >> np.uint64(self._shift)).astype(np.int64)] = np.arange(first, len(token_ids))
            return
        for end in range(first, len(token_ids)):
            self._ends[self._slot(token_ids[end - length : end])] = end

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Returns the place behind the last earlier occurrence of the text's last tokens."""
        last = token_ids[-self._length :]
        if len(last) < self._length:
            return None
        end = int(self._ends[self._slot(last)])
        return end if end and token_ids[end - self._length : end] == last else None

    def _slot(self, ngram: Sequence[int]) -> int:
        value = 0
        for token_id in ngram:
            value = (value + token_id) * _MULTIPLIER & _MASK
        return value >> self._shift


class PromptLookup:
    """Belongs to one text, which only ever grows. Reads each token once; memory is bounded, however long the text."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: how long the text may become."""
        num_slots = min(_MAX_SLOTS, max(_MIN_SLOTS, 1 << (2 * num_tokens - 1).bit_length()))
        self._indexes = [(kind, _NgramIndex(length, num_slots)) for kind, length in LENGTHS.items()]

    def propose(self, token_ids: list[int], count: int) -> Proposal | None:
        """Returns `count` tokens that may follow, or None if the last tokens did not occur before."""
        for kind, index in self._indexes:
            index.read(token_ids)
            end = index.find(token_ids)
            if end is not None:
                return Proposal(_follow(token_ids, end, count), kind)
        return None


class PromptLookups:
    """The `Proposer` with a `PromptLookup` for each sequence."""

    def __init__(self) -> None:
        self._lookups: dict[EngineSequence, PromptLookup] = {}

    def propose(self, counts: Mapping[EngineSequence, int]) -> Mapping[EngineSequence, Proposal]:
        found: dict[EngineSequence, Proposal] = {}
        for sequence, count in counts.items():
            lookup = self._lookups.get(sequence)
            if lookup is None:
                length = sequence.num_prompt_tokens + sequence.sampling.max_tokens
                lookup = self._lookups[sequence] = PromptLookup(length)
            proposal = lookup.propose(sequence.token_ids, count)
            if proposal is not None:
                found[sequence] = proposal
        return found

    def forget(self, sequence: EngineSequence) -> None:
        self._lookups.pop(sequence, None)


def _follow(token_ids: list[int], first: int, count: int) -> tuple[int, ...]:
    """Returns `count` tokens from `first` on; at the end of the text it wraps around, because the text repeats with
    that period.
    """
    found = token_ids[first : first + count]
    period = len(token_ids) - first
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)
