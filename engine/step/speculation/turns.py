"""Decides in which steps proposals may be looked for, so that speculation cannot cost more than a small share of the
time. Pure.

Speculation gets turns of some steps. Between two turns steps of the same batch size are plain, which shows what they
cost now. All that a turn takes longer than plain steps is paid from an account, which turns that gain refill; without
credit there are no turns. A policy that never falls far behind a baseline is known as a conservative bandit (Wu et al.,
2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_ALLOWANCE = 0.004  # share of the time that all accounts together may lose
_TRIAL_STEPS = 8.0  # in plain steps: what may be lost at first, and the credit at which a closed account opens again
_MAX_CREDIT_STEPS = 32.0  # in plain steps: the gains that may be lost again
_PRICE = 0.97  # share of a plain step that a saved one counts for, since its cost is not known exactly
_LONGEST_SEARCH = 8.0  # in plain steps; if a search takes longer, something else used the machine
_LONGEST_PLAIN = 3.0  # in plain steps; likewise
_SETTLING_STEPS = 8  # so many steps after one that verified are slower than other plain ones: caches are colder
_MEASURED_STEPS = 8  # plain steps that are measured between two turns
_FIRST_MEASURED_STEPS = 16  # and before the first one, because the first steps of a process are slow
_FIRST_TURN, _LONGEST_TURN = 16, 512  # steps
_FAIR = 0.98  # gain of a turn from which on the next one is longer: searches that find nothing cost a little
_TOLERANCE = 0.02  # by which the last mode, which includes the others, may gain less and still goes first
_SECOND_BEST = 8  # one turn in so many goes to the mode that gained less


class SpeculationMode(Enum):
    """Says what a step may propose."""

    PLAIN = "nothing"
    LOOKUPS = "what followed an earlier occurrence"
    DRAFTS = "the same, or what a model or a head drafts"


class _Account:
    """Keeps how many seconds one mode may still lose."""

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._has_begun = False
        self.is_open = False

    def allow(self, seconds: float, plain_s: float) -> None:
        """Adds to what may be lost; a plain step takes `plain_s`."""
        first_s = 0.0 if self._has_begun else _TRIAL_STEPS * plain_s
        self._has_begun = True
        self.add(first_s + seconds, plain_s)

    def add(self, gain_s: float, plain_s: float) -> None:
        """Records seconds that were gained, or lost if negative."""
        self._credit_s = min(self._credit_s + gain_s, _MAX_CREDIT_STEPS * plain_s)
        if self._credit_s <= 0:
            self.is_open = False
        elif self._credit_s >= _TRIAL_STEPS * plain_s:
            self.is_open = True


class _BatchTurns:
    """Keeps the turns of steps with one number of sequences."""

    def __init__(self, modes: Sequence[SpeculationMode]) -> None:
        self.mode = SpeculationMode.PLAIN
        self.num_left = _FIRST_MEASURED_STEPS  # steps of the turn, or plain ones to be measured before the next turn
        self.gains = dict.fromkeys(modes, float("inf"))  # of the last turns: plain steps' time over the time taken
        self.spent_s = self.worth_s = 0.0  # in the last turn, and what plain steps would have taken
        self.last = modes[0]  # the mode of the last turn
        self._lengths = dict.fromkeys(modes, _FIRST_TURN)  # of the next turns
        self._num_turns = 0

    def begin(self, modes: Sequence[SpeculationMode]) -> None:
        """Begins a turn of one of these modes. The last turn is judged now that the steps after it are known, too."""
        if self._num_turns:
            gain = self.gains[self.last] = self.worth_s / self.spent_s if self.spent_s else 1.0
            growth = 4 if gain > 1.5 else 2
            self._lengths[self.last] = (
                min(growth * self._lengths[self.last], _LONGEST_TURN) if gain >= _FAIR else _FIRST_TURN
            )
        self._num_turns += 1
        ascending = sorted(modes, key=self.gains.__getitem__)
        is_close = self.gains[modes[-1]] >= self.gains[ascending[-1]] - _TOLERANCE
        self.mode = self.last = modes[-1] if is_close else ascending[-1]
        self.num_left = self._lengths[self.last]
        if len(modes) > 1 and not self._num_turns % _SECOND_BEST:
            self.mode = self.last = ascending[0] if self.last != ascending[0] else ascending[-1]
            self.num_left = _FIRST_TURN
        self.spent_s = self.worth_s = 0.0

    def end(self) -> None:
        self.mode, self.num_left = SpeculationMode.PLAIN, _MEASURED_STEPS


class SpeculationTurns:
    """Gives turns to `modes`, each with an account. Every step is recorded when it ends."""

    def __init__(self, modes: Sequence[SpeculationMode]) -> None:
        self._accounts = {mode: _Account() for mode in modes}
        self._batches: dict[int, _BatchTurns] = {}
        self._num_since = _SETTLING_STEPS  # plain steps since one that verified
        self._verified: tuple[_Account, _BatchTurns] | None = None  # what the latest of those is charged to

    def mode(self, num_sequences: int) -> SpeculationMode:
        """Returns the mode of a next step with that many sequences."""
        batch = self._batches.get(num_sequences)
        if batch is None or batch.mode is SpeculationMode.PLAIN or not self._accounts[batch.mode].is_open:
            return SpeculationMode.PLAIN
        return batch.mode

    @property
    def is_settled(self) -> bool:
        """Returns whether a step that ends now shows what plain steps cost, if it searched and verified nothing."""
        return self._num_since >= _SETTLING_STEPS

    def is_resting(self, num_sequences: int) -> bool:
        """Returns whether steps with that many sequences wait for nothing but credit."""
        batch = self._batches.get(num_sequences)
        return batch is not None and batch.mode is SpeculationMode.PLAIN and batch.num_left <= 0 and self.is_settled

    def on_verified(
        self, num_sequences: int, elapsed_s: float, searched_s: float, num_plain: float, width: float, plain_s: float
    ) -> None:
        """Records a step that has verified proposals. Call `on_steps` next.

        It took `elapsed_s` after `searched_s` of looking for proposals and drafting, and has computed `width` tokens
        for each sequence on average. Its tokens would have taken `num_plain` plain steps of `plain_s`.
        """
        batch = self._batch(num_sequences)
        self._num_since, self._verified = 0, (self._accounts[batch.last], batch)
        cost_s = min(elapsed_s, (1 + width) * plain_s) + min(searched_s, _LONGEST_SEARCH * plain_s)
        self._charge(*self._verified, plain_s * (1 + _PRICE * (num_plain - 1)), cost_s, plain_s)

    def on_plain(
        self, num_sequences: int, elapsed_s: float, searched_s: float, plain_s: float, *, tapped: bool
    ) -> None:
        """Records a step that has verified nothing. Call `on_steps` next. `tapped`: it handed out hidden states."""
        excess_s = min(elapsed_s, _LONGEST_PLAIN * plain_s) - plain_s
        if self._num_since < _SETTLING_STEPS and self._verified is not None:
            self._charge(*self._verified, plain_s, plain_s + excess_s, plain_s)
            excess_s = 0.0
        self._num_since += 1
        batch = self._batches.get(num_sequences)
        if batch is not None and batch.mode is not SpeculationMode.PLAIN:
            cost_s = plain_s + min(searched_s, _LONGEST_SEARCH * plain_s) + (excess_s if tapped else 0.0)
            self._charge(self._accounts[batch.mode], batch, plain_s, cost_s, plain_s)

    def _charge(self, account: _Account, batch: _BatchTurns, worth_s: float, cost_s: float, plain_s: float) -> None:
        batch.spent_s += cost_s
        batch.worth_s += worth_s
        account.add(worth_s - cost_s, plain_s)

    def _batch(self, num_sequences: int) -> _BatchTurns:
        if num_sequences not in self._batches:
            self._batches[num_sequences] = _BatchTurns([*self._accounts])
        return self._batches[num_sequences]

    def on_steps(self, num_sequences: int, num_steps: int, plain_s: float, *, measured: bool) -> None:
        """Records that steps have ended, of which the last one had `num_sequences`, where plain ones take `plain_s`.

        `measured`: the last one showed what plain ones cost.
        """
        for account in self._accounts.values():
            account.allow(_ALLOWANCE * num_steps * plain_s / len(self._accounts), plain_s)
        batch = self._batch(num_sequences)
        if batch.mode is not SpeculationMode.PLAIN:
            batch.num_left -= 1
            if batch.num_left <= 0 or not self._accounts[batch.mode].is_open:
                batch.end()
        else:
            batch.num_left -= measured
            modes = [mode for mode, account in self._accounts.items() if account.is_open]
            if batch.num_left <= 0 and modes:
                batch.begin(modes)
