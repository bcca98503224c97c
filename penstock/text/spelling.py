"""Turns one checkpoint's tokens into text, for routers and for decode workers that stream to clients.

It uses a compiled tokenizer (`tokenizers.Tokenizer`) that the caller has loaded, so that the client needs none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_table


class Compiled(Protocol):
    """The part of `tokenizers.Tokenizer` that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def get_vocab(self, with_added_tokens: bool = True) -> Mapping[str, int]: ...

    def get_added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def to_str(self) -> str: ...


class Spelling:
    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        added = compiled.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_texts = {token_id: token.content for token_id, token in added.items() if token.special}
        self._bytes_by_id: dict[int, bytes] | None = None
        self._all_bytes: dict[int, bytes] = {}  # includes special tokens; built when they are first kept
        if (json.loads(compiled.to_str()).get("decoder") or {}).get("type") == "ByteLevel":
            self._bytes_by_id = byte_table(compiled.get_vocab(with_added_tokens=True), self._special_ids)
        self._token_texts: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens; special tokens are left out."""
        return self._compiled.decode(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens; special tokens appear by name."""
        return self._compiled.decode(token_ids, skip_special_tokens=False)

    def detokenizer(self, *, keep_special_tokens: bool = False) -> Detokenizer:
        """Returns a new detokenizer for one completion."""
        if self._bytes_by_id is None:
            kept = keep_special_tokens
            return WindowDetokenizer(*((self.decode_all, frozenset()) if kept else (self.decode, self._special_ids)))
        if not keep_special_tokens:
            return ByteDetokenizer(self._bytes_by_id)
        if not self._all_bytes:
            named = {token_id: text.encode() for token_id, text in self._special_texts.items()}
            self._all_bytes = self._bytes_by_id | named
        return ByteDetokenizer(self._all_bytes)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token. A special token appears by name; part of a character becomes U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._compiled.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text  # bounded by the vocabulary
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of `token_text`, which are exact for byte-level vocabularies."""
        if self._bytes_by_id is not None and token_id in self._bytes_by_id:
            return self._bytes_by_id[token_id]
        return self.token_text(token_id).encode()
