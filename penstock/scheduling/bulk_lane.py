"""Limits what the bulk lane may cost the other lanes at a worker. Pure.

Bulk requests are computed while no other request is, in steps so short that one that arrives meanwhile waits little.
Beside others they get one step in 1024, so that they do not starve while there are pages for them.
"""

from __future__ import annotations

STEPS_PER_TURN = 1024  # so few tokens are late that the 99th percentile hardly changes
_SHARE_OF_FIRST_TOKEN = 0.1  # of the time to first token; a request that arrives waits for half a step on average
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
    """Limits steps of bulk requests by the time that other requests' first tokens take."""

    def __init__(self) -> None:
        self._first_token_s = 0.0  # running mean
        self._observed_s = float("-inf")

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
