"""Finds stop strings across token borders: passes text through, except what may be the start of a stop string.

`StopStrings` compiles the stop strings of a request once; `StopMatcher` follows them through the text of one
completion, between the detokenizer and the client. Pure: text in, text out. The cost per character does not depend on
the stop strings: Aho and Corasick, "Efficient string matching", 1975, https://doi.org/10.1145/360825.360855.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """An automaton whose states are the prefixes of the stop strings. Immutable, and shared by a request's completions.

    Construction takes time and memory in proportion to the characters of all stop strings together, which
    `router.api.sampling_fields` limits.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.longest = max(map(len, stops), default=0)
        self._edges: dict[tuple[int, str], int] = {}  # (state, character) -> the state one character longer
        self._depth = [0]  # by state: the characters of its prefix
        self._fallback = [_ROOT]  # by state: its longest proper suffix that is also a state
        self._match = [0]  # by state: the characters of the longest stop string that ends here, 0 for none
        states = [_ROOT] * len(stops)
        for depth in range(1, self.longest + 1):  # shorter prefixes first, since fallbacks lead to them
            for rank, stop in enumerate(stops):
                if depth <= len(stop):
                    states[rank] = state = self._extend(states[rank], stop[depth - 1])
                    if depth == len(stop):
                        self._match[state] = depth

    def _extend(self, state: int, char: str) -> int:
        """Returns the state one character longer, and adds it if it is missing."""
        following = self._edges.get((state, char))
        if following is None:
            fallback = self._step(self._fallback[state], char) if state != _ROOT else _ROOT
            following = self._edges[state, char] = len(self._depth)
            self._depth.append(self._depth[state] + 1)
            self._fallback.append(fallback)
            self._match.append(self._match[fallback])
        return following

    def _step(self, state: int, char: str) -> int:
        while (following := self._edges.get((state, char))) is None and state != _ROOT:
            state = self._fallback[state]
        return following or _ROOT

    def follow(self, state: int, text: str) -> tuple[int, int, int]:
        """Follows `text` from `state` up to the first match, which ends after `end` characters; 0 without a match.

        Returns the new state, how many of the last characters belong to the match or may start one, and `end`.
        """
        edges, fallback, match = self._edges, self._fallback, self._match
        for end, char in enumerate(text, 1):
            while (following := edges.get((state, char))) is None and state != _ROOT:
                state = fallback[state]
            state = following or _ROOT
            if match[state]:
                return state, match[state], end
        return state, self._depth[state], 0


class StopMatcher:
    """Holds back at most one character less than the longest stop string.

    The match that ends first wins, or the longer of two that end together, so that the result does not depend on how
    the text was split.
    """

    def __init__(self, stops: StopStrings, *, includes_match: bool = False) -> None:
        """Ends the text after the stop string instead of before it if `includes_match`."""
        self._stops = stops
        self._includes_match = includes_match
        self._state = _ROOT
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def add(self, text: str) -> str:
        """Returns the text that may be sent now. Once `stopped`, everything after the stop string is dropped."""
        if self.stopped:
            return ""
        if not self._stops.longest:
            return text
        seen = self._held + text
        self._state, num_held, end = self._stops.follow(self._state, text)
        if end:
            end += len(self._held)
            self.matched = seen[end - num_held : end]
            self._held = ""
            return seen[: end if self._includes_match else end - num_held]
        safe = len(seen) - num_held
        self._held = seen[safe:]
        return seen[:safe]

    def skip(self, text: str) -> None:
        """Continues after `text`, which was sent earlier and holds no stop string: only its tail can start one."""
        self.add(text[max(0, len(text) - self._stops.longest + 1) :])

    def finish(self) -> str:
        """Returns the text still held back when a completion ends without a stop string."""
        held, self._held = self._held, ""
        return held
