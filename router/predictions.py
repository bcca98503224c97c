"""Predicted against actual, for each worker: how long it takes, and how much of a prompt its cache holds. Pure.

A cache may have lost pages since the prompt was placed, so one miss says nothing. Where the index keeps promising more
than there is, its picture of the worker is wrong, and is to be asked for anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.types import WorkerId

_SMOOTHING = 0.1
_MIN_PROMISES = 12  # since the last alarm
_LYING = 0.5  # mean share of promised tokens that were not there
_REST_S = 30.0  # between two alarms: a fresh picture has to show that it is true
_MAX_RATIO = 100.0


@dataclass(slots=True)
class WorkerErrors:
    """Running means."""

    time_ratio: float = 1.0  # actual time over predicted
    num_times: int = 0
    shortfall: float = 0.0  # share of promised cached tokens that were not there
    num_promises: int = 0  # since the last alarm
    num_alarms: int = 0
    alarmed_s: float = -math.inf


class Predictions:
    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerErrors] = {}

    @property
    def workers(self) -> dict[WorkerId, WorkerErrors]:
        return self._workers

    def keep(self, workers: set[WorkerId]) -> None:
        """Forgets the others: they have left."""
        self._workers = {one: errors for one, errors in self._workers.items() if one in workers}

    def on_time(self, worker_id: WorkerId, predicted_s: float, actual_s: float) -> None:
        if not (0 < predicted_s < math.inf and 0 <= actual_s < math.inf):
            return
        errors = self._of(worker_id)
        ratio = min(actual_s / predicted_s, _MAX_RATIO)
        weight = max(_SMOOTHING, 1 / (errors.num_times + 1))
        errors.time_ratio += weight * (ratio - errors.time_ratio)
        errors.num_times += 1

    def on_cache(self, worker_id: WorkerId, promised_tokens: int, actual_tokens: int, now_s: float) -> bool:
        """Whether the picture of this worker's cache has just shown to be wrong."""
        if promised_tokens <= 0:
            return False
        errors = self._of(worker_id)
        missing = max(0, promised_tokens - actual_tokens) / promised_tokens
        errors.num_promises += 1
        errors.shortfall += max(_SMOOTHING, 1 / errors.num_promises) * (missing - errors.shortfall)
        if errors.num_promises < _MIN_PROMISES or errors.shortfall < _LYING or now_s < errors.alarmed_s + _REST_S:
            return False
        errors.alarmed_s = now_s
        errors.num_alarms += 1
        errors.num_promises = 0
        return True

    def _of(self, worker_id: WorkerId) -> WorkerErrors:
        return self._workers.setdefault(worker_id, WorkerErrors())
