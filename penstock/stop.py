"""Stop strings across token borders: text passes through, and what may be the start of a stop string waits.

One matcher a completion, between the detokenizer and the client. Pure: text in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back at most the longest stop string less one character.

    The match that ends first counts, the longer one of two that end together, so that the outcome does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """The text that may go out now. Once `stopped`, everything from the stop string on is dropped."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        start = self._first_match(seen)
        if start is not None:
            self.stopped = True
            self._held = ""
            return seen[:start]
        safe = len(seen) - max(_overlap(seen, stop) for stop in self._stops)
        self._held = seen[safe:]
        return seen[:safe]

    def finish(self) -> str:
        """The text still held back, at the end of a completion that met no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, seen: str) -> int | None:
        matches = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        return min(matches)[1] if matches else None


def _overlap(seen: str, stop: str) -> int:
    """Length of the longest end of `seen` that is a proper start of `stop`."""
    for length in range(min(len(seen), len(stop) - 1), 0, -1):
        if seen.endswith(stop[:length]):
            return length
    return 0
