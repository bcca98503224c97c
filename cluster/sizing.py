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
from router.cost_model import StepCost

_FULL = 0.9  # share of a worker's capacity that a plan may use; the rest is for what balancing leaves uneven
_PAGES_FULL = 0.85
_STEADY = 0.8  # of a worker's capacity that traffic may take for long: what comes unevenly needs the rest
_RECENT_S = 60.0
_MOST_GROWTH = 2.0  # by forecast, over what came of late
_MOST_CORRECTION = 1.5
_CORRECTION_UP = 0.05  # of a decision at which fewer requests were in time than planned
_CORRECTION_DOWN_S = 600.0
_CLEARLY = 3.0  # times as many late ones as planned: of the few that end in a minute, one says little


@dataclass(frozen=True, slots=True)
class Need:
    """`replicas` None: not known yet. `fewer` is what would do with room to spare: only below it may a pool shrink."""

    replicas: int | None
    fewer: int
    reason: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Those of late. Tokens; None: not known."""

    typical: float  # the length of those that the work lies in, which are longer than the mean
    uncached: float  # share that has to be computed


class Correction:
    """More than the plan says, while more requests are late than planned; forgotten slowly."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._late = _CLEARLY * (1 - config.attainment)
        self.factor = 1.0

    def learn(self, share_in_time: float | None, after_s: float) -> None:
        """`share_in_time` of what came to be in the last minute; None: nothing did."""
        if share_in_time is not None and 1 - share_in_time > self._late:
            self.factor = min(_MOST_CORRECTION, self.factor + _CORRECTION_UP)
        else:
            self.factor += (1.0 - self.factor) * min(1.0, after_s / _CORRECTION_DOWN_S)


class PrefillSizer:
    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        self._trend = Trend()
        self._correction = Correction(config)

    def learn(self, one: Bin, after_s: float, share_in_time: float | None) -> None:
        self._trend.add(one.prefill_per_s, after_s)
        self._correction.learn(share_in_time, after_s)

    def need(
        self, history: History, profile: Profile, prompts: Prompts, backlog: float, serving: int, start_s: float
    ) -> Need:
        if not any(one.prefill_per_s for one in history.bins) and backlog <= 0:
            return Need(0, 0, "no prompt came", {})
        if profile.prefill_per_s is None:
            return Need(None, 0, "no worker has computed a prompt yet")
        per_s = profile.prefill_per_s * _FULL / self._correction.factor
        forecast = self._trend.ahead(start_s)
        growth = _growth(forecast, history.highest(_RECENT_S, lambda one: one.prefill_per_s))
        slack_s = self._slack_s(prompts, profile.prefill_per_s)
        arrivals = [one.prefill_per_s for one in history.bins]
        allowed = (1 - self._config.attainment) / 2
        replayed = _fewest(arrivals, per_s / growth, history.bin_s, slack_s, allowed)
        fewer = _fewest(arrivals, per_s * _FULL / growth, history.bin_s, slack_s, allowed)
        steady_per_s = profile.prefill_per_s * _STEADY / self._correction.factor
        ahead = math.ceil(forecast / steady_per_s) if self._trend.rises(start_s) else 0
        behind = self._to_catch_up(backlog, history, per_s, serving, start_s, slack_s)
        figures = {
            "tokens_per_s": _mean([one.prefill_per_s for one in history.recent(_RECENT_S)]),
            "forecast_tokens_per_s": forecast,
            "worker_tokens_per_s": profile.prefill_per_s,
            "correction": self._correction.factor,
            "queued_tokens": backlog,
            "slack_s": slack_s,
            "for_history": replayed,
            "for_forecast": ahead,
            "for_backlog": behind,
        }
        share = f"{self._config.attainment:.0%}"
        reasons = {
            f"{replayed} would have started {share} of the last {history.length_s:.0f} s in time": replayed,
            f"{ahead} keep up with {forecast:.0f} tokens/s, forecast for when a new one serves": ahead,
            f"{behind} catch up with {backlog:.0f} queued tokens": behind,
        }
        reason = max(reasons, key=lambda one: reasons[one])
        return Need(reasons[reason], max(fewer, ahead, behind), reason, figures)

    def _slack_s(self, prompts: Prompts, per_s: float) -> float:
        """That a prompt may wait before it is computed."""
        limit_s = self._config.slo.first_token_s(int(prompts.typical))
        return max(limit_s / 5, limit_s - prompts.typical * prompts.uncached / per_s)

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
    """By what each moment's sequences and their contexts would have added to a step, and by the pages they held."""

    def __init__(self, config: AutoscalerConfig, max_batch: int) -> None:
        self._config = config
        self._max_batch = max_batch
        self._trend = Trend()
        self._correction = Correction(config)

    def learn(self, one: Bin, after_s: float, share_in_time: float | None) -> None:
        self._trend.add(one.sequences, after_s)
        self._correction.learn(share_in_time, after_s)

    def need(self, history: History, profile: Profile, start_s: float) -> Need:
        if not any(one.sequences for one in history.bins):
            return Need(0, 0, "no token was drawn", {})
        cost = profile.decode
        if cost is None or not profile.pages:
            return Need(None, 0, "no worker has drawn a token yet")
        itl_s = self._config.slo.itl_s
        forecast = self._trend.ahead(start_s)
        growth = _growth(forecast, history.highest(_RECENT_S, lambda one: one.sequences))
        busiest = {
            "steps": [self._share_of_step(one, cost) * self._correction.factor / _FULL for one in history.bins],
            "pages": [one.pages / (profile.pages * _PAGES_FULL) for one in history.bins],
            "places": [one.sequences / self._max_batch for one in history.bins],
        }
        workers = {what: weighted_quantile(some, self._config.attainment) * growth for what, some in busiest.items()}
        decides = max(workers, key=lambda what: workers[what])
        recent = history.recent(_RECENT_S)
        sequences = _mean([one.sequences for one in recent])
        context = _mean([one.contexts for one in recent]) / sequences if sequences else 0.0
        batch = min(self._max_batch, max(1.0, (itl_s - cost.fixed_s) / _each_s(cost, context)))
        figures = {
            "sequences": sequences,
            "forecast_sequences": forecast,
            "context_tokens": context,
            "worker_sequences": batch,
            "worker_tokens_per_s": batch / (cost.fixed_s + batch * _each_s(cost, context)),
            "pages": max(one.pages for one in recent),
            "worker_pages": profile.pages,
            "correction": self._correction.factor,
            **{f"for_{what}": count for what, count in workers.items()},
        }
        what = {
            "steps": f"steps within {itl_s:g} s a token",
            "pages": f"pages, {profile.pages:.0f} a worker",
            "places": f"places, {self._max_batch} a worker",
        }[decides]
        most = workers[decides]
        reason = f"the busiest moments of the last {history.length_s:.0f} s took {most:.1f} workers' {what}"
        return Need(math.ceil(most), math.ceil(most / _FULL), reason, figures)

    def _share_of_step(self, one: Bin, cost: StepCost) -> float:
        """Of the time that steps may take besides their fixed part, in workers."""
        each_s = _each_s(cost, one.contexts / one.sequences) if one.sequences else 0.0
        return one.sequences * each_s / max(self._config.slo.itl_s - cost.fixed_s, each_s, 1e-9)


def bin_of(work: Work, num_prefilling: int, after_s: float) -> Bin:
    """`num_prefilling` of the sequences held by decode workers wait for their prompts, the others for room."""
    pending = max(0, work.num_held - work.num_running - num_prefilling)
    each = work.pages / max(1, work.num_held - pending)
    sequences = work.num_running + pending
    return Bin(work.prefill_tokens / after_s, sequences, sequences * work.context, work.pages + pending * each)


def _each_s(cost: StepCost, context: float) -> float:
    """That one sequence adds to a step."""
    return max(cost.token_s + context * cost.context_s, 1e-9)


def _growth(forecast: float, highest: float) -> float:
    """Of what has come, where the trend leads beyond the busiest minute of it."""
    return min(_MOST_GROWTH, max(1.0, forecast / highest)) if highest > 0 else 1.0


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
