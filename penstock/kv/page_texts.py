"""Remembers the tokens of each cached page, for readers of KV events that do not know Penstock's page hashes.

A page hash cannot be turned back into its tokens. A worker that publishes its events to other projects' routers keeps
the tokens of its pages: about 200 bytes for a page of 16 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.kv.adapter_files import AdapterRef
from penstock.kv.page_places import ROOT
from penstock.types import PageHash


class TextSource(Protocol):
    """A sequence whose pages enter the prefix cache."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def salt(self) -> bytes: ...

    @property
    def adapter(self) -> AdapterRef | None: ...


class PageText(NamedTuple):
    """The inputs of a full page's hash."""

    parent: PageHash  # ROOT for the first page of a text
    tokens: array[int]
    salt: bytes
    adapter: AdapterRef | None


class PageTexts:
    """Maps pages to their texts. Callers synchronize."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._texts: dict[PageHash, PageText] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def note(self, source: TextSource, hashes: Sequence[PageHash], first: int) -> list[PageHash]:
        """Remembers the texts of the pages `hashes[first:]` of a sequence. Returns those that were not known."""
        texts, size = self._texts, self._page_size
        new: list[PageHash] = []
        for index in range(first, len(hashes)):
            if hashes[index] not in texts:
                tokens = array("I", source.token_ids[index * size : (index + 1) * size])
                parent = hashes[index - 1] if index else ROOT
                texts[hashes[index]] = PageText(parent, tokens, source.salt, source.adapter)
                new.append(hashes[index])
        return new

    def get(self, page: PageHash) -> PageText | None:
        return self._texts.get(page)

    def forget(self, pages: Sequence[PageHash]) -> None:
        for page in pages:
            self._texts.pop(page, None)
