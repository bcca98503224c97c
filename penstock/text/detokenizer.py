"""Detokenizes incrementally: turns token ids into pieces of whole characters that add up to the whole text.

Each completion has one, before its stop strings. Byte-level vocabularies (Llama 3, Qwen, GPT-2) decode through a table
of bytes and an incremental UTF-8 decoder; all others decode a short window twice, with and without the newest tokens
(the prefix-offset method of text-generation-inference). Either does constant work per token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 8  # an unfinished character has at most 3 bytes and so 3 tokens; more are invalid

Decode = Callable[[Sequence[int]], str]  # decodes a list of ids without special tokens


class Detokenizer(Protocol):
    def add(self, token_ids: Iterable[int]) -> str:
        """Returns the new text; an unfinished character waits for its other bytes."""
        ...

    def finish(self) -> str:
        """Returns the text left at the end: U+FFFD for an unfinished character."""
        ...


class ByteDetokenizer:
    """Detokenizes byte-level vocabularies. `bytes_by_id` lacks special tokens, whose text is empty."""

    def __init__(self, bytes_by_id: Mapping[int, bytes]) -> None:
        self._bytes_by_id = bytes_by_id
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        get = self._bytes_by_id.get
        return self._decoder.decode(b"".join([get(token_id, b"") for token_id in token_ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizes with any decoder. The window holds the last piece's tokens, which affect the next piece, and the
    pending ones."""

    def __init__(self, decode: Decode, special_ids: frozenset[int]) -> None:
        self._decode = decode
        self._special_ids = special_ids
        self._window: list[int] = []
        self._num_shown = 0  # leading tokens of the window whose text was already returned
        self._shown = ""  # their text

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join([self._add(token_id) for token_id in token_ids if token_id not in self._special_ids])

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = text.endswith(_REPLACEMENT) or len(text) < len(self._shown)
        if unfinished and len(self._window) - self._num_shown < _MAX_PENDING_TOKENS:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._window)) if len(self._window) > self._num_shown else ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return piece


def byte_table(vocabulary: Mapping[str, int], special_ids: frozenset[int]) -> dict[int, bytes]:
    """Returns the bytes of each token of a byte-level vocabulary; tokens outside its alphabet are taken literally."""
    byte_of = {char: byte for byte, char in _byte_level_alphabet().items()}
    table = {}
    for token, token_id in vocabulary.items():
        if token_id in special_ids:
            continue
        spelt = all(char in byte_of for char in token)
        table[token_id] = bytes(byte_of[char] for char in token) if spelt else token.encode()
    return table


def _byte_level_alphabet() -> dict[int, str]:
    """Maps bytes to characters as GPT-2's encoder does: printable Latin-1 to itself, the others to U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}
