"""Limits what the bulk lane may cost the other lanes at a worker. Pure.

Bulk requests are computed while no other request is, in short steps. If even these are long beside the time to first
token of other requests, pauses follow them, so that few requests arrive during one. Beside others they get one step in
1024, so that they do not starve while there are pages for them.
"""

from __future__ import annotations

STEPS_PER_TURN = 1024  # so few tokens are late that the 99th percentile hardly changes
_SHARE_OF_FIRST_TOKEN = 0.1  # of the time to first token, for a step
_SHARE_OF_DELAY = 0.02  # of the time to first token, by which bulk steps may delay a request on average
_MOST_RESTS = 4.0  # longest pause after a step, in times of that step
_SMOOTHING = 0.1  # weight of the newest first token
_MEMORY_S = 600.0  # after this long without other requests, bulk steps are as long as any


class BulkTurns:
    """Counts the steps since bulk requests were computed last."""

    def __init__(self) -> None:
        self._num_steps = 0

    @property
    def is_due(self) -> bool:
        """Returns whether bulk requests may be computed in the next step although it computes others."""
        return self._num_steps + 1 >= STEPS_PER_TURN

    def on_step(self, *, was_turn: bool) -> None:
        """Counts a step that found bulk requests; `was_turn` says that it was theirs."""
        self._num_steps = 0 if was_turn else self._num_steps + 1


class BulkStepLimit:
    """Limits steps of bulk requests by the time that other requests' first tokens take.

    A request that arrives during such a step waits for half of it on average. With a pause after each step it arrives
    during one with the probability step / (step + pause), which makes its expected delay
    step^2 / (2 * (step + pause)).
    """

    def __init__(self) -> None:
        self._first_token_s = 0.0  # running mean
        self._observed_s = float("-inf")
        self._rest_s = 0.0  # length of the newest pause
        self._rests_until_s = float("-inf")  # no bulk step begins before
        self._refused = False  # whether a step that was to begin had to wait, and `sweep` has not yet said until when

    def on_first_token(self, elapsed_s: float, now_s: float) -> None:
        """Takes the time to the first token of a request of another lane."""
        is_first = now_s - self._observed_s > _MEMORY_S
        self._first_token_s += (elapsed_s - self._first_token_s) * (1.0 if is_first else _SMOOTHING)
        self._observed_s = now_s

    def step_s(self, now_s: float) -> float | None:
        """Returns the longest time for a step of bulk requests, in seconds; None: any."""
        if now_s - self._observed_s > _MEMORY_S:
            return None
        return _SHARE_OF_FIRST_TOKEN * self._first_token_s

    @property
    def rests(self) -> bool:
        """Returns whether bulk steps are followed by pauses, so that the next one must not be planned before."""
        return self._rest_s > 0.0

    def on_step(self, elapsed_s: float, now_s: float) -> None:
        """Begins the pause after a step that has computed bulk requests alone."""
        delay_s = _SHARE_OF_DELAY * self._first_token_s
        if now_s - self._observed_s > _MEMORY_S or delay_s <= 0.0:
            self._rest_s = 0.0
        else:
            self._rest_s = min(max(0.0, elapsed_s**2 / (2 * delay_s) - elapsed_s), _MOST_RESTS * elapsed_s)
        self._rests_until_s = now_s + self._rest_s

    def may_begin(self, now_s: float) -> bool:
        """Returns whether no pause keeps a bulk step from beginning now. If one does, `sweep` says when it ends."""
        self._refused = now_s < self._rests_until_s
        return not self._refused

    def sweep(self, now_s: float) -> float | None:
        """Returns when a step that was refused may begin, even if that time has just come; None if none was refused."""
        if not self._refused:
            return None
        self._refused = now_s < self._rests_until_s
        return self._rests_until_s
