"""Turns the words that an output must not hold into sequences of tokens, which workers ban. No I/O of its own."""

from __future__ import annotations

from dataclasses import replace

from penstock.types import SamplingParams
from router.text.tokenizer import Tokenizer


async def with_bad_sequences(sampling: SamplingParams, tokenizer: Tokenizer, caller: str) -> SamplingParams:
    """Returns the parameters with the tokens of their bad words: as an output begins with them, and after a space.

    Raises Overloaded.
    """
    if not sampling.bad_words:
        return sampling
    words = [word.lstrip() for word in sampling.bad_words]
    encoded = await tokenizer.encode_each([*words, *(f" {word}" for word in words)], caller)
    sequences = dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids)
    return replace(sampling, bad_sequences=tuple(sequences))
