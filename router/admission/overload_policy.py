"""Measures how full the deployment is and decides how far the router sheds load, level by level. Pure.

By default no level is ever reached: shedding and shortening are options (`penstock.config.admission`).

Saturation is the worst of the known signals: the router's own queue, the workers' queues, their pages. Unknown signals
are left out; where none is known the level stays as it was, since no data is not the same as no load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

from penstock.config.admission import AdmissionConfig, OverloadConfig
from router.admission.capacity import FleetState

_SMOOTHING_S = 1.0
_MAX_SATURATION = 2.0  # higher values count as this, so that saturation falls again soon
_QUEUE_PRESSURE = 0.25  # saturation at which the workers' queues are as long as routers mean to keep them
_STEEPNESS = 3  # exponent of shedding: few requests are shed at first, all of them at saturation 1


class OverloadLevel(IntEnum):
    """The router's level of response to overload. Each level includes those before it."""

    NORMAL = 0
    SHORTEN = 1  # answers get fewer tokens
    PAUSE_BULK = 2  # new bulk requests are refused
    REFUSE = 3  # only interactive requests may queue


def worst(signals: Iterable[float | None]) -> float | None:
    """Returns the highest known signal, None where none is known."""
    return max((signal for signal in signals if signal is not None), default=None)


def fleet_pressure(fleet: FleetState, config: AdmissionConfig) -> float | None:
    """Returns the saturation of the workers' queues and pages.

    Caches are meant to fill the pages, so only the last tenth of them counts.
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
    excess = (saturation - shed_from) / (1.0 - shed_from)
    return min(1.0, max(0.0, excess)) ** _STEEPNESS


class OverloadPolicy:
    """Raises the level at once and lowers it one step at a time, after a calm while, so that it does not flicker."""

    def __init__(self, config: OverloadConfig) -> None:
        self._config = config
        self._thresholds = (  # by level; infinite where the operator has not asked for it
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
        """Takes the saturation since the last call, None where it is not known."""
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
