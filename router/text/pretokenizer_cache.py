"""Cuts prompts into segments that can be tokenized separately, and caches the segments' ids. Pure.

A tokenizer first splits a text at its added tokens, from left to right, and tokenizes each stretch between them
separately. So the ids of a text are those of its segments in order, where each segment after the first begins with an
added token. A conversation rendered by a chat template has such a token at every turn: when it grows, only its last
segments are new, and the others are looked up. Not thread-safe.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_SEGMENTS = 16384  # take a few milliseconds to look up; a conversation has two or three for each message
_ENTRY_BYTES = 200  # approximate memory of a cached segment besides its text and ids


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An added token of tokenizer.json."""

    content: str
    normalized: bool = False  # searched for in the normalized text, and so after the others
    single_word: bool = False  # not recognized next to a letter
    strips: bool = False  # includes the white space next to it


class SegmentCutter:
    """Cuts texts at those added tokens that are recognized whatever precedes them."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        contents = [token.content for token in tokens if token.content]
        safe = [token.content for token in tokens if token.content and _is_safe(token, contents)]
        longest_first = sorted(safe, key=len, reverse=True)  # the tokenizer prefers the longest as well
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if safe else None

    def cut(self, text: str) -> list[str]:
        """Returns the segments, which are not empty and join to the text. Does not cut a text that has too many."""
        if self._pattern is None:
            return [text] if text else []
        found = itertools.islice(self._pattern.finditer(text), _MAX_SEGMENTS + 1)
        starts = [0, *(match.start() for match in found), len(text)]
        if len(starts) > _MAX_SEGMENTS + 2:
            return [text]
        return [text[start:end] for start, end in itertools.pairwise(starts) if start < end]


def _is_safe(token: AddedToken, contents: Sequence[str]) -> bool:
    """Returns whether the tokenizer recognizes the token, or a longer one, wherever its text occurs."""
    text = token.content
    if token.normalized or token.single_word or token.strips:
        return False
    if text != text.strip() or text[0].isalnum() or text[0] == "_":
        return False  # another token could strip its space, or not be recognized next to it
    return not any(_covers(other, text) for other in contents)


def _covers(other: str, text: str) -> bool:
    """Returns whether `other` may begin before `text` and end within or after it."""
    if text in other[1:]:
        return True
    return any(other.endswith(text[:length]) for length in range(1, min(len(text), len(other))))


class PretokenizerCache:
    """Ids of segments by scope and text, with the least recently used evicted first. Scopes share no entries."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, scope: str, segment: str) -> array[int] | None:
        key = (scope, segment)
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def put(self, scope: str, segment: str, ids: array[int]) -> None:
        """Adds a segment, unless it is known or takes more than a quarter of the cache."""
        key, size = (scope, segment), _size(segment, ids)
        if size > self._max_bytes // 4 or key in self._entries:
            return
        self._entries[key] = ids
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            (_, oldest), old_ids = self._entries.popitem(last=False)
            self.num_bytes -= _size(oldest, old_ids)


def _size(segment: str, ids: array[int]) -> int:
    width = 1 if segment.isascii() else 4  # the most bytes that a character of the string may take
    return len(segment) * width + len(ids) * ids.itemsize + _ENTRY_BYTES
