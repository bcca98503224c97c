"""Keeps the logit edits of one sequence up to date as its text grows.

Its sequence holds it (`Sequence.edits`) and `engine.sampling.row_edits` reads it while a step is laid out, on the step
loop. Each text is read once: the cost of a step grows with what was appended since the last one, not with the length of
the text. Nothing is carried over when a sequence migrates, and a discarded token is never read, because it is never
appended.

Imports numpy but no torch. Ids outside the vocabulary are skipped, since they cannot be sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from penstock.errors import InvalidInput
from penstock.types import SamplingParams


class TextEdits:
    """Belongs to one sequence. The `token_ids` that its calls are given are its text, which only ever grows."""

    def __init__(
        self, sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._num_prompt_tokens = num_prompt_tokens
        self._bad_sequences = [bad for bad in sampling.bad_sequences if bad and 0 <= bad[-1] < vocab_size]
        self._ending = self._known(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ending |= self._known(eos_token_ids)
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        self.bias_tokens = np.array(list(bias), np.int64)
        self.bias_values = np.array(list(bias.values()), np.float32)
        self._allowed: Collection[int] = range(vocab_size)
        self.allowed_tokens: np.ndarray | None = None  # int64, without repeats; None: all of the vocabulary
        if sampling.allowed_token_ids:
            self._allowed = self._known(sampling.allowed_token_ids) | self._ending
            self.allowed_tokens = np.array(sorted(self._allowed), np.int64)
        # Counts how often each token that penalties apply to is in the output.
        self._first = 0 if sampling.repetition_penalty != 1.0 else num_prompt_tokens
        self._place: dict[int, int] = {}
        self._num_read = self._first
        self._num_seen = 0
        self._tokens = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)

    def _known(self, token_ids: Iterable[int]) -> set[int]:
        return {token for token in token_ids if 0 <= token < self._vocab_size}

    def seen(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct tokens that penalties apply to, and how often each is in the output.

        They include the prompt's tokens if there is a repetition penalty. The arrays change with the next call.
        """
        if self._num_read == self._first:
            self._read_all(token_ids)
        for position in range(self._num_read, len(token_ids)):
            self._count(token_ids[position], int(position >= self._num_prompt_tokens))
        self._num_read = len(token_ids)
        return self._tokens[: self._num_seen], self._counts[: self._num_seen]

    def _read_all(self, token_ids: Sequence[int]) -> None:
        text = np.array(token_ids[self._first :], np.int64)
        tokens = np.unique(text)
        tokens = tokens[(tokens >= 0) & (tokens < self._vocab_size)]
        output = text[self._num_prompt_tokens - self._first :]
        output = output[np.isin(output, tokens)]
        self._num_read, self._num_seen = len(token_ids), len(tokens)
        self._place = {token: place for place, token in enumerate(tokens.tolist())}
        room = np.zeros(max(64, len(tokens)), np.int64)
        self._tokens = np.concatenate((tokens, room))
        self._counts = np.concatenate((np.bincount(np.searchsorted(tokens, output), minlength=len(tokens)), room))

    def _count(self, token_id: int, times: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            if not 0 <= token_id < self._vocab_size:
                return
            place = self._place[token_id] = self._num_seen
            self._num_seen += 1
            if place == len(self._tokens):
                room = np.zeros(place, np.int64)
                self._tokens, self._counts = (np.concatenate((column, room)) for column in (self._tokens, self._counts))
            self._tokens[place] = token_id
        self._counts[place] += times

    def banned(self, token_ids: Sequence[int], position: int) -> list[tuple[int, int]]:
        """Returns the tokens that must not be sampled at `position`, each with the condition under which it is banned.

        The condition is a token: the ban applies if the text's last token, which is not appended yet, is that one. -1
        means that it always applies. Raises InvalidInput if no token is certain to be left.
        """
        num_output_tokens = position - self._num_prompt_tokens
        bans = self._completing(token_ids, position) if self._bad_sequences else []
        ending: set[int] = set()
        if num_output_tokens < self._sampling.min_tokens and self._sampling.grammar is None:
            ending = self._ending  # with a grammar, its mask bans them
        if not bans and not ending:
            return bans
        banned = {token for token, _ in bans}
        if self._leaves_any(banned | ending):
            return bans + [(token, -1) for token in ending]
        # If only tokens that end the sequence are left, the request may stop early instead.
        if self._leaves_any(banned):
            return bans
        raise InvalidInput(
            "sampling.bad_words",
            f"and allowed_token_ids leave no token to sample after {num_output_tokens} tokens of output; allow "
            "more tokens, or ban fewer words",
        )

    def _leaves_any(self, banned: set[int]) -> bool:
        return len(self._allowed) > len(banned) or any(token not in banned for token in self._allowed)

    def _completing(self, token_ids: Sequence[int], position: int) -> list[tuple[int, int]]:
        """Returns the tokens that would complete a bad sequence within the output, each with its condition."""
        num_awaited = position - len(token_ids)
        output_start = self._num_prompt_tokens
        found: dict[tuple[int, int], None] = {}
        for bad in self._bad_sequences:
            num_before = len(bad) - 1
            num_known = num_before - num_awaited
            if position - num_before < output_start:
                continue
            if num_before == 0:
                found[bad[-1], -1] = None
            elif tuple(token_ids[len(token_ids) - num_known :]) == bad[:num_known]:
                found[bad[-1], bad[-2] if num_awaited else -1] = None
        return list(found)
