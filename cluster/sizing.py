"""How many workers each pool needs: the fewest that would have served the traffic of late as it came, with what is
forecast on top and what waits now. Pure.

A size is held against the traffic itself (`traffic.share_late`), not against its mean: how bursts overlap with the time
that a request may wait decides how much room they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.profiles import Profile, Work
from cluster.traffic import Bin, History, Trend, share_late, weighted_quantile
from penstock.autoscaler_config import AutoscalerConfig

_FULL = 0.9  # share of a worker's capacity that a plan may use; the rest is for what balancing leaves uneven
_PAGES_FULL = 0.85
_RECENT_S = 60.0
_MOST_GROWTH = 2.0  # by forecast, over what came of late
_MOST_CORRECTION = 1.5
_CORRECTION_UP = 0.05  # of a decision at which fewer requests were in time than planned
_CORRECTION_DOWN_S = 600.0
_CLEARLY = 3.0  # times as many late ones as planned: of the few that end in a minute, one says little
_BIG_PROMPTS = 2.0  # times the mean: what a large one takes to compute is off what it may wait


@dataclass(frozen=True, slots=True)
class Need:
    """`replicas` None: not known yet. `fewer` is what would do with room to spare: only below it may a pool shrink."""

    replicas: int | None
    fewer: int
    reason: str
    figures: dict[str, float] = field(default_factory=dict)


class PrefillSizer:
    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        self._trend = Trend()
        self._correction = 1.0

    def learn(self, one: Bin, after_s: float, share_in_time: float | None) -> None:
        """`share_in_time` of the requests that got their first token of late; None: none did."""
        self._trend.add(one.prefill_per_s, after_s)
        if share_in_time is not None and 1 - share_in_time > _CLEARLY * (1 - self._config.attainment):
            self._correction = min(_MOST_CORRECTION, self._correction + _CORRECTION_UP)
        else:
            self._correction += (1.0 - self._correction) * min(1.0, after_s / _CORRECTION_DOWN_S)

    def need(
        self, history: History, profile: Profile, mean_prompt: float, backlog: float, serving: int, start_s: float
    ) -> Need:
        recent = _mean([one.prefill_per_s for one in history.recent(_RECENT_S)])
        if not any(one.prefill_per_s for one in history.bins) and backlog <= 0:
            return Need(0, 0, "no prompt came", {})
        if profile.prefill_per_s is None:
            return Need(None, 0, "no worker has computed a prompt yet")
        per_s = profile.prefill_per_s * _FULL / self._correction
        forecast = self._trend.ahead(start_s)
        growth = min(_MOST_GROWTH, max(1.0, forecast / recent)) if recent > 0 else 1.0
        slack_s = self._slack_s(mean_prompt, profile.prefill_per_s)
        arrivals = [one.prefill_per_s for one in history.bins]
        allowed = (1 - self._config.attainment) / 2
        replayed = _fewest(arrivals, per_s / growth, history.bin_s, slack_s, allowed)
        fewer = _fewest(arrivals, per_s * _FULL / growth, history.bin_s, slack_s, allowed)
        behind = self._to_catch_up(backlog, history, per_s, serving, start_s, slack_s)
        figures = {
            "tokens_per_s": recent,
            "forecast_tokens_per_s": forecast,
            "worker_tokens_per_s": profile.prefill_per_s,
            "correction": self._correction,
            "queued_tokens": backlog,
            "slack_s": slack_s,
            "for_history": replayed,
            "for_backlog": behind,
        }
        reason = (
            f"{replayed} would have started {self._config.attainment:.0%} of the last {history.length_s:.0f} s in time"
            if replayed >= behind
            else f"{behind} catch up with {backlog:.0f} queued tokens"
        )
        return Need(max(replayed, behind), max(fewer, behind), reason, figures)

    def _slack_s(self, mean_prompt: float, per_s: float) -> float:
        """That a prompt may wait before it is computed."""
        limit_s = self._config.slo.first_token_s(int(mean_prompt))
        return max(limit_s / 5, limit_s - _BIG_PROMPTS * mean_prompt / per_s)

    def _to_catch_up(
        self, backlog: float, history: History, per_s: float, serving: int, start_s: float, slack_s: float
    ) -> int:
        """With what will still wait once a new worker serves.

        A burst is taken to go on as long as it looks when seen over twice that time: what is over by then needs nobody.
        """
        rate = _mean([one.prefill_per_s for one in history.recent(max(_RECENT_S, 2 * start_s))])
        left = max(0.0, backlog + (rate - serving * per_s) * start_s)
        if left <= serving * per_s * slack_s:
            return 0
        return math.ceil((rate + left / max(slack_s, start_s)) / per_s)


class DecodeSizer:
    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        self._trend = Trend()
        self._correction = 1.0

    def learn(self, one: Bin, after_s: float, share_in_time: float | None) -> None:
        self._trend.add(one.decode_per_s, after_s)
        if share_in_time is not None and 1 - share_in_time > _CLEARLY * (1 - self._config.attainment):
            self._correction = min(_MOST_CORRECTION, self._correction + _CORRECTION_UP)
        else:
            self._correction += (1.0 - self._correction) * min(1.0, after_s / _CORRECTION_DOWN_S)

    def need(self, history: History, profile: Profile, start_s: float) -> Need:
        rates = [one.decode_per_s for one in history.bins]
        if not any(rates):
            return Need(0, 0, "no token was drawn", {})
        if profile.decode_per_s is None or not profile.pages:
            return Need(None, 0, "no worker has drawn a token yet")
        recent = _mean([one.decode_per_s for one in history.recent(_RECENT_S)])
        forecast = self._trend.ahead(start_s)
        growth = min(_MOST_GROWTH, max(1.0, forecast / recent)) if recent > 0 else 1.0
        peak = weighted_quantile(rates, self._config.attainment) * growth * self._correction
        pages = weighted_quantile([one.pages for one in history.bins], self._config.attainment) * growth
        for_steps = peak / (profile.decode_per_s * _FULL)
        for_pages = pages / (profile.pages * _PAGES_FULL)
        figures = {
            "tokens_per_s": recent,
            "forecast_tokens_per_s": forecast,
            "busy_tokens_per_s": peak,
            "worker_tokens_per_s": profile.decode_per_s,
            "worker_batch": profile.decode_batch or 0.0,
            "pages": pages,
            "worker_pages": profile.pages,
            "correction": self._correction,
        }
        what = (
            f"{peak:.0f} tokens/s at {profile.decode_per_s:.0f} a worker within {self._config.slo.itl_s:g} s a token"
            if for_steps >= for_pages
            else f"{pages:.0f} pages at {profile.pages:.0f} a worker"
        )
        most = max(for_steps, for_pages)
        return Need(math.ceil(most), math.ceil(most / _FULL), what, figures)


def bin_of(work: Work, num_prefilling: int, after_s: float, itl_s: float) -> Bin:
    """`num_prefilling` of the sequences held by decode workers wait for their prompts, the others for room."""
    pending = max(0, work.num_held - work.num_running - num_prefilling)
    each = work.pages / max(1, work.num_held - pending)
    return Bin(work.prefill_tokens / after_s, work.decode_per_s + pending / itl_s, work.pages + pending * each)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _fewest(arrivals: Sequence[float], per_s: float, bin_s: float, slack_s: float, allowed: float) -> int:
    """The fewest workers with which no larger share would have been late; found by bisection."""
    low, high = 0, max(1, math.ceil(max(arrivals, default=0.0) / per_s))
    while low + 1 < high:
        middle = (low + high) // 2
        if share_late(arrivals, middle * per_s, bin_s, slack_s) > allowed:
            low = middle
        else:
            high = middle
    return high
