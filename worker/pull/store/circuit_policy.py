"""Decides whether to go on using a store that has failed. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_FAILURES = 3  # in a row
_FIRST_PAUSE_S = 5.0  # doubles with each further failure, up to
_LONGEST_PAUSE_S = 120.0


@dataclass(slots=True)
class Circuit:
    """Opens after several failures in a row; then one call at a time tests whether the store works again."""

    _num_failures: int = 0
    _pause_s: float = _FIRST_PAUSE_S
    _paused_until_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Returns whether the last calls have failed, so that the store is only called as a trial."""
        return self._num_failures >= _MAX_FAILURES

    def allows(self, now_s: float) -> bool:
        """Returns whether to call the store now. A call that is allowed after a pause starts the next pause."""
        if not self.is_open:
            return True
        if now_s < self._paused_until_s:
            return False
        self._paused_until_s = now_s + self._pause_s
        return True

    def on_success(self) -> None:
        self._num_failures, self._pause_s = 0, _FIRST_PAUSE_S

    def on_failure(self, now_s: float) -> bool:
        """Counts a failure. Returns whether it opens the circuit."""
        self._num_failures += 1
        if not self.is_open:
            return False
        was_given_up = self._num_failures > _MAX_FAILURES
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return not was_given_up
