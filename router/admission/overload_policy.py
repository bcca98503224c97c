"""Measures how full the deployment is and decides, level by level, how much load the router sheds. Pure.

By default the level is always NORMAL: shedding and shortening are options (`penstock.config.admission`).

Saturation is the highest of the known signals: the router's own queue, the workers' queues and their pages. If no
signal is known, the level stays as it is, since missing data does not mean missing load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

from penstock.config.admission import AdmissionConfig, OverloadConfig
from router.admission.capacity import FleetState

_SMOOTHING_S = 1.0
_MAX_SATURATION = 2.0  # higher values are clipped, so that the smoothed saturation falls again soon
_QUEUE_PRESSURE = 0.25  # saturation when the workers' queues are as long as routers mean to keep them
_STEEPNESS = 3  # exponent of the shed probability: few requests are shed at first, all at saturation 1


class OverloadLevel(IntEnum):
    """The router's level of response to overload. Each level includes those before it."""

    NORMAL = 0
    SHORTEN = 1  # outputs get fewer tokens
    PAUSE_BULK = 2  # bulk requests that would have to queue are refused
    REFUSE = 3  # only interactive requests may queue


def worst(signals: Iterable[float | None]) -> float | None:
    """Returns the highest known signal, or None if none is known."""
    return max((signal for signal in signals if signal is not None), default=None)


def fleet_pressure(fleet: FleetState, config: AdmissionConfig) -> float | None:
    """Returns the saturation of the workers' queues and pages.

    Prefix caches are meant to fill the pages, so the use of pages counts only from 0.1 below its limit on.
    """
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
    """Returns 0 up to a saturation of `shed_from`, rising to 1 at saturation 1."""
    excess = (saturation - shed_from) / (1.0 - shed_from)
    return min(1.0, max(0.0, excess)) ** _STEEPNESS


class OverloadPolicy:
    """Raises the level at once but lowers it one level at a time, after a calm period, so that it does not flap."""

    def __init__(self, config: OverloadConfig) -> None:
        self._config = config
        self._thresholds = (  # by level; infinite for levels that the configuration does not enable
            -math.inf,
            math.inf if config.max_tokens is None else config.shorten_at,
            config.pause_bulk_at if config.shed else math.inf,
            config.refuse_at if config.shed else math.inf,
        )
        self._observed_s: float | None = None
        self._calm_since_s: float | None = None
        self.saturation = 0.0  # smoothed
        self.level = OverloadLevel.NORMAL

    def observe(self, saturation: float | None, now_s: float) -> None:
        """Updates the smoothed saturation and the level. `saturation` is None if it is unknown."""
        if saturation is None:
            self._observed_s = now_s
            self._calm_since_s = None
            return
        passed_s = _SMOOTHING_S if self._observed_s is None else now_s - self._observed_s
        self._observed_s = now_s
        share = 1.0 - math.exp(-max(0.0, passed_s) / _SMOOTHING_S)
        self.saturation += share * (min(saturation, _MAX_SATURATION) - self.saturation)
        reached = max(level for level in OverloadLevel if self.saturation >= self._thresholds[level])
        if reached >= self.level:
            self.level = reached
            self._calm_since_s = None
        self._lower(now_s)

    def _lower(self, now_s: float) -> None:
        if self.level is OverloadLevel.NORMAL or self.saturation >= self._thresholds[self.level] - self._config.margin:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= self._config.hold_s:
            self.level = max(
                level for level in OverloadLevel if level < self.level and self._thresholds[level] < math.inf
            )
            self._calm_since_s = now_s
