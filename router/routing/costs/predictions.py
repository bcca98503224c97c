"""Compares each worker's predicted times and cached tokens with the actual ones. Pure.

A cache may have evicted pages since the prompt was placed, so one miss proves nothing. If the index keeps promising
more than the worker has, it is wrong about the worker and needs a new snapshot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.types import WorkerId

_SMOOTHING = 0.1
_MIN_PROMISES = 12  # after an alarm, before the next one
_MAX_SHORTFALL = 0.5  # mean share of promised tokens that are missing, from which on the index counts as wrong
_ALARM_INTERVAL_S = 30.0  # gives a new snapshot time to take effect
_MAX_RATIO = 100.0


@dataclass(slots=True)
class WorkerPredictionErrors:
    """Running means of one worker's prediction errors."""

    time_ratio: float = 1.0  # actual time over predicted
    num_times: int = 0
    shortfall: float = 0.0  # share of promised cached tokens that were missing
    num_promises: int = 0  # since the last alarm
    num_alarms: int = 0
    alarmed_s: float = -math.inf


class Predictions:
    """The prediction errors of every worker that requests were placed on."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerPredictionErrors] = {}

    @property
    def workers(self) -> dict[WorkerId, WorkerPredictionErrors]:
        return self._workers

    def keep(self, workers: set[WorkerId]) -> None:
        """Forgets all other workers, which have left."""
        self._workers = {worker_id: errors for worker_id, errors in self._workers.items() if worker_id in workers}

    def on_time(self, worker_id: WorkerId, predicted_s: float, actual_s: float) -> None:
        if not (0 < predicted_s < math.inf and 0 <= actual_s < math.inf):
            return
        errors = self._errors(worker_id)
        ratio = min(actual_s / predicted_s, _MAX_RATIO)
        weight = max(_SMOOTHING, 1 / (errors.num_times + 1))
        errors.time_ratio += weight * (ratio - errors.time_ratio)
        errors.num_times += 1

    def on_cache(self, worker_id: WorkerId, promised_tokens: int, actual_tokens: int, now_s: float) -> bool:
        """Returns whether this comparison shows that the index is wrong about the worker's cache."""
        if promised_tokens <= 0:
            return False
        errors = self._errors(worker_id)
        missing = max(0, promised_tokens - actual_tokens) / promised_tokens
        errors.num_promises += 1
        errors.shortfall += max(_SMOOTHING, 1 / errors.num_promises) * (missing - errors.shortfall)
        if errors.num_promises < _MIN_PROMISES or errors.shortfall < _MAX_SHORTFALL:
            return False
        if now_s < errors.alarmed_s + _ALARM_INTERVAL_S:
            return False
        errors.alarmed_s = now_s
        errors.num_alarms += 1
        errors.num_promises = 0
        return True

    def _errors(self, worker_id: WorkerId) -> WorkerPredictionErrors:
        return self._workers.setdefault(worker_id, WorkerPredictionErrors())
