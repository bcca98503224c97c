"""How full the deployment is, and what the router does about it, step by step. Pure: time is passed in.

Saturation is the worst of what is known: the router's own queue, the queues at the workers, their pages. What is not
known is left out; where nothing is known everything stays as it was, for no data is not the same as no load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

from penstock.admission_config import AdmissionConfig, OverloadConfig
from router.capacity import FleetState

_SMOOTHING_S = 1.0
_MOST = 2.0  # saturation counts no further, so that it also falls in time
_QUEUE_PRESSURE = 0.25  # of workers' queues as long as routers mean to keep them
_STEEPNESS = 3  # of shedding: few at first, everyone at saturation 1


class Level(IntEnum):
    """Each step includes those before it."""

    NORMAL = 0
    SHORTEN = 1  # answers get fewer tokens
    PAUSE_BULK = 2  # new bulk requests are refused
    REFUSE = 3  # only interactive requests may queue


def worst(signals: Iterable[float | None]) -> float | None:
    """None where no signal is known."""
    return max((one for one in signals if one is not None), default=None)


def fleet_pressure(fleet: FleetState, config: AdmissionConfig) -> float | None:
    """Of the workers' own queues and pages. Full pages are what a cache is for: only the last tenth tells."""
    signals: list[float | None] = []
    if fleet.page_use is not None:
        signals.append(0.5 + 5.0 * (fleet.page_use - config.max_page_use))
    if fleet.queued_prefill_tokens is not None and fleet.prefill_tokens_per_s:
        queue_s = fleet.queued_prefill_tokens / fleet.prefill_tokens_per_s
        signals.append(_QUEUE_PRESSURE * queue_s / config.prefill_queue_s)
    if fleet.num_waiting is not None and fleet.slots:
        signals.append(_QUEUE_PRESSURE * fleet.num_waiting / fleet.slots)
    pressure = worst(signals)
    return None if pressure is None else max(0.0, pressure)


def shed_probability(saturation: float, shed_from: float) -> float:
    excess = (saturation - shed_from) / (1.0 - shed_from)
    return min(1.0, max(0.0, excess)) ** _STEEPNESS


class Overload:
    """Rises at once, falls one step at a time and only after a while, so that it does not flicker."""

    def __init__(self, config: OverloadConfig) -> None:
        self._config = config
        self._begins = (-math.inf, config.shorten_at, config.pause_bulk_at, config.refuse_at)
        self._seen_s: float | None = None
        self._calm_since_s: float | None = None
        self.saturation = 0.0  # smoothed
        self.level = Level.NORMAL

    def observe(self, saturation: float | None, now_s: float) -> None:
        """The load has been so since the last call. None: not known."""
        if saturation is None:
            self._seen_s = now_s
            self._calm_since_s = None
            return
        passed_s = _SMOOTHING_S if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        share = 1.0 - math.exp(-max(0.0, passed_s) / _SMOOTHING_S)
        self.saturation += share * (min(saturation, _MOST) - self.saturation)
        reached = max(step for step in Level if self.saturation >= self._begins[step])
        if reached >= self.level:
            self.level = reached
            self._calm_since_s = None
        self._fall(now_s)

    def _fall(self, now_s: float) -> None:
        if self.level is Level.NORMAL or self.saturation >= self._begins[self.level] - self._config.margin:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= self._config.hold_s:
            self.level = Level(self.level - 1)
            self._calm_since_s = now_s
