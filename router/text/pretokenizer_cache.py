"""Cuts prompts where their parts tokenize as they do within the whole, and caches the ids of the parts. Pure.

A tokenizer takes its added tokens out of the text first, from left to right, and works on each stretch between them by
itself. So the ids of a text are those of its segments in order, where each segment after the first begins with an added
token. A conversation as a chat template renders it has such a token at every turn: when it grows only its last segments
are new, and the others are looked up. Not thread-safe.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_SEGMENTS = 16384  # looked up in a few milliseconds; a conversation has two or three for each message
_ENTRY_BYTES = 200  # of a cached segment besides its text and ids, approximately


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An added token as tokenizer.json describes it."""

    content: str
    normalized: bool = False  # looked for in the normalized text, hence after the others
    single_word: bool = False  # not recognized beside a letter
    strips: bool = False  # swallows the white space beside it


class SegmentCutter:
    """Cuts only at tokens that nothing to the left of them could swallow or undo."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        contents = [token.content for token in tokens if token.content]
        safe = [token.content for token in tokens if token.content and _is_safe(token, contents)]
        longest_first = sorted(safe, key=len, reverse=True)  # as the tokenizer prefers them
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if safe else None

    def cut(self, text: str) -> list[str]:
        """Returns the segments, none of them empty; joined they are the text. A text of too many stays whole."""
        if self._pattern is None:
            return [text] if text else []
        found = itertools.islice(self._pattern.finditer(text), _MAX_SEGMENTS + 1)
        starts = [0, *(match.start() for match in found), len(text)]
        if len(starts) > _MAX_SEGMENTS + 2:
            return [text]
        return [text[start:end] for start, end in itertools.pairwise(starts) if start < end]


def _is_safe(token: AddedToken, contents: Sequence[str]) -> bool:
    """Returns whether the tokenizer recognizes the token, or a longer one, wherever its text stands."""
    text = token.content
    if token.normalized or token.single_word or token.strips:
        return False
    if text != text.strip() or text[0].isalnum() or text[0] == "_":
        return False  # it could end another token's white space, or touch a token that must stand alone
    return not any(_covers(other, text) for other in contents)


def _covers(other: str, text: str) -> bool:
    """Returns whether `other` may begin before `text` does and end within or after it."""
    if text in other[1:]:
        return True
    return any(other.endswith(text[:length]) for length in range(1, min(len(text), len(other))))


class PretokenizerCache:
    """Ids of segments by scope and text; the least recently used leave first. Scopes never see each other's."""

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
    width = 1 if segment.isascii() else 4  # the widest that a string's characters may be
    return len(segment) * width + len(ids) * ids.itemsize + _ENTRY_BYTES
