"""Where a text may be cut so that its parts tokenize as they do within the whole, and what known parts came to.

A tokenizer takes its added tokens out of the text first, from left to right, and works on each stretch between them by
itself. So the ids of a text are those of its segments, one after the other, where each segment after the first begins
with an added token. A conversation as a chat template renders it has such a token at every turn: when it grows only its
last segments are new, and the others are looked up. Pure; not for several threads.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY_BYTES = 200  # of a cached segment besides its text and ids, about


@dataclass(frozen=True, slots=True)
class AddedToken:
    """As tokenizer.json has it."""

    content: str
    normalized: bool = False  # looked for in the normalized text, hence after the others
    single_word: bool = False  # no token beside a letter
    strips: bool = False  # takes the white space beside it


class Cutter:
    """Cuts only at tokens that nothing to the left of them could have swallowed or undone."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        contents = [token.content for token in tokens if token.content]
        safe = [token.content for token in tokens if token.content and _is_safe(token, contents)]
        longest_first = sorted(safe, key=len, reverse=True)  # as the tokenizer prefers them
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if safe else None

    def cut(self, text: str) -> list[str]:
        """Segments, none of them empty; together they are the text."""
        if self._pattern is None:
            return [text] if text else []
        starts = [0, *(found.start() for found in self._pattern.finditer(text)), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(starts) if start < end]


def _is_safe(token: AddedToken, contents: Sequence[str]) -> bool:
    """Whether the tokenizer takes it, or a longer token, for one wherever its text stands."""
    text = token.content
    if token.normalized or token.single_word or token.strips:
        return False
    if text != text.strip() or text[0].isalnum() or text[0] == "_":
        return False  # it could end another's white space, or a word that another must stand alone beside
    return not any(_covers(other, text) for other in contents)


def _covers(other: str, text: str) -> bool:
    """Whether `other` may begin before `text` does and end within or after it."""
    if text in other[1:]:
        return True
    return any(other.endswith(text[:length]) for length in range(1, min(len(text), len(other))))


class SegmentCache:
    """Ids of segments by scope and text, the least recently used leaving first. Scopes never see each other's."""

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
        key, size = (scope, segment), _size(segment, ids)
        if size > self._max_bytes // 4 or key in self._entries:
            return
        self._entries[key] = ids
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            (_, oldest), old_ids = self._entries.popitem(last=False)
            self.num_bytes -= _size(oldest, old_ids)


def _size(segment: str, ids: array[int]) -> int:
    width = 1 if segment.isascii() else 4  # the widest that a string's characters may have
    return len(segment) * width + len(ids) * ids.itemsize + _ENTRY_BYTES
