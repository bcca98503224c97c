"""Learns what steps without chunks of prompts cost. Pure."""

from __future__ import annotations

import bisect
import statistics

_SMOOTHING = 0.1  # weight of the newest measurement
_PLAIN_SMOOTHING = 0.2  # of plain steps: the few that are measured between two turns replace most of what was known
_FIRST = 8  # until there are more measurements than this, their median counts: the first ones are often slow
_OUTLIER = 3.0  # times the known cost: a longer step counts as this long, since something else used the machine
_DOUBT = 0.002  # share of an untested cost that is forgotten at a time
_ASSUMED_SLOPE = 0.02  # share of a step by which one more token is assumed to lengthen it, until two sizes are known


class StepCostTable:
    """Owns a running mean of a step's seconds for each measured number of tokens. Costs in between are interpolated.
    Beyond them each token lengthens a step as much as it does among them, but at most by its proportional share.
    """

    def __init__(self, smoothing: float = _SMOOTHING) -> None:
        self._smoothing = smoothing
        self._tokens: list[int] = []  # ascending
        self._seconds: list[float] = []
        self._first: dict[int, list[float]] = {}  # the first measurements, by number of tokens

    @property
    def is_empty(self) -> bool:
        return not self._tokens

    def shrink_towards(self, seconds: float, share: float) -> None:
        """Moves every cost by a share of its distance from `seconds`."""
        self._seconds = [known + share * (seconds - known) for known in self._seconds]

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        place = bisect.bisect_left(self._tokens, num_tokens)
        if place < len(self._tokens) and self._tokens[place] == num_tokens:
            mean_s, first = self._seconds[place], self._first[num_tokens]
            if len(first) < _FIRST:
                first.append(elapsed_s)
                self._seconds[place] = statistics.median(first)
            else:
                self._seconds[place] += (min(elapsed_s, _OUTLIER * mean_s) - mean_s) * self._smoothing
        else:
            self._tokens.insert(place, num_tokens)
            self._seconds.insert(place, elapsed_s)
            self._first[num_tokens] = [elapsed_s]

    def knows(self, num_tokens: int) -> bool:
        """Returns whether steps of exactly that many tokens have been measured often enough."""
        return len(self._first.get(num_tokens, ())) == _FIRST

    def predict(self, num_tokens: int) -> float:
        """Returns seconds; at least one step must have been measured."""
        tokens, seconds = self._tokens, self._seconds
        place = bisect.bisect_left(tokens, num_tokens)
        if place == len(tokens):
            return seconds[-1] + self._slope() * (num_tokens - tokens[-1])
        if place == 0 or tokens[place] == num_tokens:
            return seconds[place]
        share = (num_tokens - tokens[place - 1]) / (tokens[place] - tokens[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def _slope(self) -> float:
        tokens, seconds = self._tokens, self._seconds
        share = seconds[-1] / tokens[-1]
        if len(tokens) < 2:
            return min(share, _ASSUMED_SLOPE * seconds[-1])
        return min(share, max(0.0, (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0])))


class SpeculationCosts:
    """Keeps plain steps, which compute one token for each sequence, apart from those that verify proposals.

    The latter cost more than plain ones of as many tokens: their sequences have no rows, and their tokens are delivered
    one by one.
    """

    def __init__(self) -> None:
        self._plain = StepCostTable(_PLAIN_SMOOTHING)
        self._verifying: dict[int, StepCostTable] = {}  # by bits of the number of sequences

    def observe(self, num_sequences: int, num_proposed: int, elapsed_s: float) -> None:
        if num_proposed:
            table = self._verifying.setdefault(num_sequences.bit_length(), _ratios())
            highest = 2 + num_proposed / num_sequences  # largest multiple; beyond it, something else used the machine
            table.observe(num_proposed, min(highest, elapsed_s / self._plain.predict(num_sequences)))
        else:
            self._plain.observe(num_sequences, elapsed_s)

    @property
    def is_empty(self) -> bool:
        return self._plain.is_empty

    def doubt(self, num_sequences: int) -> None:
        """Trusts the known cost of verifying with about that many sequences a little less, because it is no longer
        measured, while contexts, the machine's load and other conditions change.
        """
        if (table := self._verifying.get(num_sequences.bit_length())) is not None:
            table.shrink_towards(1.0, _DOUBT)

    def knows(self, num_sequences: int) -> bool:
        """Returns whether plain steps of exactly that many sequences have been measured often enough."""
        return self._plain.knows(num_sequences)

    def knows_verifying(self, num_sequences: int) -> bool:
        """Returns whether a step of about that many sequences has verified proposals."""
        return num_sequences.bit_length() in self._verifying

    def predict(self, num_sequences: int, num_proposed: int = 0) -> float:
        """Returns seconds; at least one plain step must have been measured.

        Until a step of about that many sequences has verified proposals, each proposed token is taken to cost as much
        as another sequence.
        """
        plain_s = self._plain.predict(num_sequences)
        if not num_proposed:
            return plain_s
        table = self._verifying.get(num_sequences.bit_length())
        if table is None:
            return max(plain_s, self._plain.predict(num_sequences + num_proposed))
        return plain_s * max(1.0, table.predict(num_proposed))


def _ratios() -> StepCostTable:
    """Returns a table of multiples of a plain step, which verifies nothing."""
    table = StepCostTable()
    table.observe(0, 1.0)
    return table
