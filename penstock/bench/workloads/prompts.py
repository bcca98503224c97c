"""Writes prompts that are planned as blocks as text or token ids, such that equal block ids give equal prefixes."""

from __future__ import annotations

import random
from functools import lru_cache

from penstock.bench.workloads.plan import PromptBlocks
from penstock.errors import InvalidInput

TOKEN_IDS = range(1000, 2000)  # plain tokens in nearly every vocabulary; control tokens lie outside
_CACHED_BLOCKS = 1 << 14
# Short common words, which most tokenizers know as one token each.
_TEXT = """
the of and to in is was for it with as his on be at by had not are but from or have an they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because
long each just state those people too mr how little good world make very year still see own work men day get
here old life both between being under three never know same last another while us might great go come since
against right came take used himself few house use place during high without again home around small however
"""
_WORDS = _TEXT.split()


class PromptWriter:
    """Writes prompts. Prompts of different salts share nothing, so that no run hits the pages of an earlier one."""

    def __init__(self, salt: str, token_ids: range = TOKEN_IDS, words_per_token: float = 1.0) -> None:
        """`token_ids` are the ids to use; `words_per_token` is how many common words the server's tokenizer puts in a
        token.
        """
        if len(token_ids) < 2 or token_ids.start < 0:
            raise InvalidInput(
                "token ids", f"from {token_ids.start} to {token_ids.stop}: give at least two, such as 1000:2000"
            )
        self._salt = salt
        self._token_ids = token_ids
        self._words_per_token = words_per_token
        self._ids_of = lru_cache(_CACHED_BLOCKS)(self._make_ids)
        self._words_of = lru_cache(_CACHED_BLOCKS)(self._make_words)

    def token_ids(self, prompt: PromptBlocks) -> list[int]:
        """Returns exactly `prompt.num_tokens` token ids."""
        ids: list[int] = []
        for first, count in prompt.runs:
            for block in range(first, first + count):
                ids += self._ids_of(block, prompt.block_tokens)
        del ids[prompt.num_tokens :]
        return ids

    def text(self, prompt: PromptBlocks) -> str:
        """Returns about `prompt.num_tokens` tokens as words."""
        words: list[str] = []
        for first, count in prompt.runs:
            for block in range(first, first + count):
                words += self._words_of(block, prompt.block_tokens)
        del words[max(1, round(prompt.num_tokens * self._words_per_token)) :]
        return " ".join(words)

    def _make_ids(self, block: int, block_tokens: int) -> list[int]:
        return random.Random(f"{self._salt}/{block}").choices(self._token_ids, k=block_tokens)

    def _make_words(self, block: int, block_tokens: int) -> list[str]:
        count = max(1, round(block_tokens * self._words_per_token))
        return random.Random(f"{self._salt}/{block}").choices(_WORDS, k=count)
