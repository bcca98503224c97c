"""Tests the tokens of bad words, both at the start of an output and after a space."""

from __future__ import annotations

from pathlib import Path

from penstock.types import SamplingParams
from router.text.tokenizer import Tokenizer, with_bad_sequences

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"


async def test_each_word_is_tokenized_with_and_without_a_space() -> None:
    tokenizer = Tokenizer.load(MODEL)
    try:
        sampling = SamplingParams(max_tokens=4, bad_words=("cat", " dog", "cat"))
        found = (await with_bad_sequences(sampling, tokenizer, "")).bad_sequences
        texts = [tokenizer.spelling.decode(sequence) for sequence in found]
        assert texts == ["cat", "dog", " cat", " dog"]
        plain = SamplingParams(max_tokens=4)
        assert await with_bad_sequences(plain, tokenizer, "") is plain
    finally:
        tokenizer.close()
