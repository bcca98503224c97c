"""Ids of plain texts word by word: what the words of earlier texts came to is looked up. Pure; not for several threads.

A byte-level tokenizer first cuts a text into words by rules of its own and then encodes each word by itself. So the ids
of a text are those of its words, one after the other. Only texts in ASCII without added tokens are cut here, and only
by rules known by heart: their cuts are certain to be the library's, which takes several times as long.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_WORDS = 32_768  # remembered, then all are forgotten: some 8 MB
_MAX_WORD_CHARACTERS = 64
_LEARN = 16  # new words of one text

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_KNOWN = (_GPT2, _LLAMA3, _QWEN2)  # each matches every character of any text


class Words:
    """`encode` makes ids of several texts at once, without special tokens."""

    def __init__(
        self,
        rules: Sequence[re.Pattern[str]],
        added: Sequence[str],
        encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    ) -> None:
        first, *self._later = rules
        self._find = first.findall
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._encode = encode
        self._ids: dict[str, Sequence[int]] = {}

    def ids(self, text: str) -> list[int] | None:
        """Without special tokens. None for a text that must go through the library, as a whole."""
        if not text.isascii() or (self._added is not None and self._added.search(text)):
            return None
        words: list[str] = self._find(text)
        for rule in self._later:
            words = list(itertools.chain.from_iterable(map(rule.findall, words)))
        try:
            return list(itertools.chain.from_iterable(map(self._ids.__getitem__, words)))
        except KeyError:
            return self._learn(words)

    def _learn(self, words: Sequence[str]) -> list[int] | None:
        """Where most of a text is new the library is quicker; some of the words are learnt in any case."""
        new = [word for word in dict.fromkeys(words) if word not in self._ids]
        learnt = [word for word in new if len(word) <= _MAX_WORD_CHARACTERS][:_LEARN]
        if len(self._ids) + len(learnt) > _MAX_WORDS:
            self._ids.clear()
            return None
        self._ids.update(zip(learnt, map(tuple, self._encode(learnt)), strict=True))
        if len(learnt) < len(new):
            return None
        return list(itertools.chain.from_iterable(map(self._ids.__getitem__, words)))


def word_rules(description: Mapping[str, Any]) -> list[re.Pattern[str]] | None:
    """Of a tokenizer.json: what cuts an ASCII text into words, applied one after the other. None where not known."""
    model, normalizer = description["model"], description.get("normalizer")
    if normalizer is not None and normalizer != {"type": "NFC"}:  # ASCII is its own NFC
        return None
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    cutter = description.get("pre_tokenizer") or {}
    rules: list[re.Pattern[str]] = []
    for step in cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else [cutter]:
        found = _rule(step)
        if found is None:
            return None
        if found:
            rules.append(re.compile(found, re.ASCII))
    return rules or None


def _rule(step: Mapping[str, Any]) -> str | None:
    """Of one step; empty where it cuts nothing, None where that is not known."""
    match step.get("type"):
        case "ByteLevel" if not step.get("add_prefix_space", True):
            return _in_ascii(_GPT2) if step.get("use_regex", True) else ""
        case "Digits":
            return r"[0-9]|[^0-9]+" if step.get("individual_digits") else r"[0-9]+|[^0-9]+"
        case "Split" if step.get("behavior") == "Isolated" and not step.get("invert"):
            pattern = step.get("pattern", {}).get("Regex")
            return _in_ascii(pattern) if pattern in _KNOWN else None
    return None


def _in_ascii(pattern: str) -> str:
    """Letters and numbers of ASCII in the place of Unicode's; classes within brackets stay there."""
    bare = pattern.replace(r"\s\p{L}\p{N}]", r"\sa-zA-Z0-9]").replace(r"\r\n\p{L}\p{N}]", r"\r\na-zA-Z0-9]")
    return bare.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")
