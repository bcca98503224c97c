"""Computes how many workers each pool needs: the fewest that would have served the recent traffic as it arrived, and
that cope with the forecast and with what waits now. Pure.

A size is tested against the traffic itself (`traffic.share_late`), not against its mean: how long bursts last compared
with the time a request may wait determines the headroom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.scaling.profiles import ObservedWork, WorkerProfile
from cluster.scaling.traffic import TrafficBin, TrafficHistory, Trend, share_late, weighted_quantile
from penstock.config.autoscaler import AutoscalerConfig
from penstock.types import WorkerLoad
from router.routing.costs.cost_model import StepCost

_FULL = 0.9  # share of a worker's capacity that plans use; the rest absorbs uneven load
_PAGES_FULL = 0.85
_STEADY = 0.8  # share of a worker's capacity for sustained traffic; bursts need the rest
_RECENT_S = 60.0
_MAX_GROWTH = 2.0  # most that the forecast may exceed recent traffic by, as a factor
_MAX_CORRECTION = 1.5
_CORRECTION_UP = 0.05  # added at each decision with too many late requests
_CORRECTION_DOWN_S = 600.0
_LATE_FACTOR = 3.0  # too many: this multiple of the planned share, as a minute holds few requests


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """The number of workers that a pool needs, with the reason.

    `replicas` is None while unknown. `fewer` would suffice with headroom; a pool never shrinks below it.
    """

    replicas: int | None
    fewer: int
    reason: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptMix:
    """Statistics of the recent prompts."""

    typical: float  # length of the prompts that cause most work, longer than the mean
    uncached: float  # share of tokens that must be computed


class SizeCorrection:
    """A factor on the plan, which grows while more requests are late than planned and decays slowly."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._late = _LATE_FACTOR * (1 - config.attainment)
        self.factor = 1.0

    def learn(self, share_in_time: float | None, after_s: float) -> None:
        """Adapts the factor to the last minute's `share_in_time`; None means that nothing happened."""
        if share_in_time is not None and 1 - share_in_time > self._late:
            self.factor = min(_MAX_CORRECTION, self.factor + _CORRECTION_UP)
        else:
            self.factor += (1.0 - self.factor) * min(1.0, after_s / _CORRECTION_DOWN_S)


class PrefillSizer:
    """Sizes the prefill pool by replaying the arrivals of uncached prompt tokens."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        self._trend = Trend()
        self._correction = SizeCorrection(config)

    def learn(self, newest: TrafficBin, after_s: float, share_in_time: float | None) -> None:
        self._trend.add(newest.prefill_per_s, after_s)
        self._correction.learn(share_in_time, after_s)

    def need(
        self,
        history: TrafficHistory,
        profile: WorkerProfile,
        prompts: PromptMix,
        backlog: float,
        serving: int,
        start_s: float,
    ) -> PoolNeed:
        if not any(each.prefill_per_s for each in history.bins) and backlog <= 0:
            return PoolNeed(0, 0, "no prompts arrived", {})
        if profile.prefill_per_s is None:
            return PoolNeed(None, 0, "no worker has computed a prompt yet")
        per_s = profile.prefill_per_s * _FULL / self._correction.factor
        forecast = self._trend.ahead(start_s)
        growth = _growth(forecast, history.highest(_RECENT_S, lambda each: each.prefill_per_s))
        slack_s = self._slack_s(prompts, profile.prefill_per_s)
        arrivals = [each.prefill_per_s for each in history.bins]
        allowed = (1 - self._config.attainment) / 2
        replayed = _fewest(arrivals, per_s / growth, history.bin_s, slack_s, allowed)
        fewer = _fewest(arrivals, per_s * _FULL / growth, history.bin_s, slack_s, allowed)
        steady_per_s = profile.prefill_per_s * _STEADY / self._correction.factor
        ahead = math.ceil(forecast / steady_per_s) if self._trend.rises(start_s) else 0
        behind = self._to_catch_up(backlog, history, per_s, serving, start_s, slack_s)
        figures = {
            "tokens_per_s": _mean([each.prefill_per_s for each in history.recent(_RECENT_S)]),
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
            f"{ahead} keep up with {forecast:.0f} tokens/s, forecast for when a new worker is ready": ahead,
            f"{behind} catch up with {backlog:.0f} queued tokens": behind,
        }
        reason = max(reasons, key=lambda text: reasons[text])
        return PoolNeed(reasons[reason], max(fewer, ahead, behind), reason, figures)

    def _slack_s(self, prompts: PromptMix, per_s: float) -> float:
        """Returns how long a prompt may wait before its prefill starts."""
        limit_s = self._config.slo.first_token_s(int(prompts.typical))
        return max(limit_s / 5, limit_s - prompts.typical * prompts.uncached / per_s)

    def _to_catch_up(
        self, backlog: float, history: TrafficHistory, per_s: float, serving: int, start_s: float, slack_s: float
    ) -> int:
        """Returns the size that clears what will still be waiting when a new worker is ready.

        A burst is assumed to continue at the rate of the last two start times: one that is over by then needs no
        worker.
        """
        rate = _mean([each.prefill_per_s for each in history.recent(max(_RECENT_S, 2 * start_s))])
        left = max(0.0, backlog + (rate - serving * per_s) * start_s)
        if left <= serving * per_s * slack_s:
            return 0
        return math.ceil((rate + left / max(slack_s, start_s)) / per_s)


class DecodeSizer:
    """Sizes the decode pool by step time, by pages and by batch slots."""

    def __init__(self, config: AutoscalerConfig, max_batch: int) -> None:
        self._config = config
        self._max_batch = max_batch
        self._trend = Trend()
        self._correction = SizeCorrection(config)

    def learn(self, newest: TrafficBin, after_s: float, share_in_time: float | None) -> None:
        self._trend.add(newest.sequences, after_s)
        self._correction.learn(share_in_time, after_s)

    def need(self, history: TrafficHistory, profile: WorkerProfile, start_s: float) -> PoolNeed:
        if not any(each.sequences for each in history.bins):
            return PoolNeed(0, 0, "no tokens were generated", {})
        cost = profile.decode
        if cost is None or not profile.pages:
            return PoolNeed(None, 0, "no worker has generated a token yet")
        itl_s = self._config.slo.itl_s
        forecast = self._trend.ahead(start_s)
        growth = _growth(forecast, history.highest(_RECENT_S, lambda each: each.sequences))
        busiest = {
            "steps": [self._share_of_step(each, cost) * self._correction.factor / _FULL for each in history.bins],
            "pages": [each.pages / (profile.pages * _PAGES_FULL) for each in history.bins],
            "places": [each.sequences / self._max_batch for each in history.bins],
        }
        attainment = self._config.attainment
        workers = {limit: weighted_quantile(used, attainment) * growth for limit, used in busiest.items()}
        tightest = max(workers, key=lambda limit: workers[limit])
        recent = history.recent(_RECENT_S)
        sequences = _mean([each.sequences for each in recent])
        context = _mean([each.contexts for each in recent]) / sequences if sequences else 0.0
        batch = min(self._max_batch, max(1.0, (itl_s - cost.fixed_s) / _each_s(cost, context)))
        figures = {
            "sequences": sequences,
            "forecast_sequences": forecast,
            "context_tokens": context,
            "worker_sequences": batch,
            "worker_tokens_per_s": batch / (cost.fixed_s + batch * _each_s(cost, context)),
            "pages": max(each.pages for each in recent),
            "worker_pages": profile.pages,
            "correction": self._correction.factor,
            **{f"for_{limit}": count for limit, count in workers.items()},
        }
        described = {
            "steps": f"steps within {itl_s:g} s a token",
            "pages": f"pages, {profile.pages:.0f} a worker",
            "places": f"places, {self._max_batch} a worker",
        }[tightest]
        most = workers[tightest]
        reason = f"the busiest moments of the last {history.length_s:.0f} s took {most:.1f} workers' {described}"
        return PoolNeed(math.ceil(most), math.ceil(most / _FULL), reason, figures)

    def _share_of_step(self, moment: TrafficBin, cost: StepCost) -> float:
        """Returns the time that one bin's sequences add to steps, as a multiple of what the ITL target allows one
        worker.
        """
        each_s = _each_s(cost, moment.contexts / moment.sequences) if moment.sequences else 0.0
        return moment.sequences * each_s / max(self._config.slo.itl_s - cost.fixed_s, each_s, 1e-9)


def num_waiting_for_decode(
    work: ObservedWork, num_prefilling: int, loads: Sequence[WorkerLoad], max_batch: int, num_waiting: int
) -> int:
    """Returns how many of the requests waiting in the routers wait for decode workers; 0 while these have room.

    The count is at most what runs now, so that a burst at most doubles the pool at a time.
    """
    slots = max_batch * len(loads)
    has_slots = work.num_held - num_prefilling < slots
    has_pages = work.pages < _PAGES_FULL * sum(load.total_pages for load in loads)
    return 0 if has_slots and has_pages else min(num_waiting, slots)


def bin_of(work: ObservedWork, num_prefilling: int, after_s: float, num_waiting: int = 0) -> TrafficBin:
    """Returns the bin of one interval.

    Decode workers hold sequences without running them: `num_prefilling` wait for their prompts, the others for room.
    The latter count as demand, as do the `num_waiting` that the routers hold back for lack of room.
    """
    held_back = max(0, work.num_held - work.num_running - num_prefilling)
    each = work.pages / max(1, work.num_held - held_back)
    pending = held_back + num_waiting
    sequences = work.num_running + pending
    return TrafficBin(work.prefill_tokens / after_s, sequences, sequences * work.context, work.pages + pending * each)


def _each_s(cost: StepCost, context: float) -> float:
    """Returns the seconds that one sequence adds to a step."""
    return max(cost.token_s + context * cost.context_s, 1e-9)


def _growth(forecast: float, highest: float) -> float:
    """Returns by how much the forecast exceeds the busiest recent minute, as a bounded factor."""
    return min(_MAX_GROWTH, max(1.0, forecast / highest)) if highest > 0 else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _fewest(arrivals: Sequence[float], per_s: float, bin_s: float, slack_s: float, allowed: float) -> int:
    """Finds by bisection the fewest workers with which at most `allowed` of the work is late."""
    low, high = 0, max(1, math.ceil(max(arrivals, default=0.0) / per_s))
    while low + 1 < high:
        middle = (low + high) // 2
        if share_late(arrivals, middle * per_s, bin_s, slack_s) > allowed:
            low = middle
        else:
            high = middle
    return high
