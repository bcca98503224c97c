"""Who may not come in, why, and when to come back. Pure: time and randomness are passed in.

A hint is jittered, so that those who are refused together do not come back together.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from penstock.admission_config import AdmissionConfig
from penstock.types import Lane
from router.accounts import TenantAccounts
from router.capacity import Outstanding
from router.forecast import Estimator, Forecast
from router.lanes import Case, LaneQueue
from router.overload import Level, Overload, shed_probability
from router.verdicts import Ask, Reason, Refused

_PATIENCE = 0.5  # of a lane's longest wait: whoever comes after that goes behind
_HINT_UNKNOWN_S = 1.0
_SHORTEST_HINT_S = 0.1
_LONGEST_HINT_S = 60.0


def due_s(ask: Ask, config: AdmissionConfig) -> float:
    """When a request of its tenant and lane must have gone, before all that are due later."""
    return min(ask.deadline_s, ask.arrived_s + _PATIENCE * config.lane(ask.lane).max_wait_s)


class Judge:
    """Owns nothing: reads what admission keeps."""

    def __init__(
        self,
        config: AdmissionConfig,
        rng: random.Random,
        lanes: Mapping[Lane, LaneQueue],
        accounts: TenantAccounts,
        forecast: Forecast,
        estimator: Estimator,
        overload: Overload,
        out: Outstanding,
    ) -> None:
        self._config = config
        self._rng = rng
        self._lanes = lanes
        self._accounts = accounts
        self._forecast = forecast
        self._estimator = estimator
        self._overload = overload
        self._out = out

    def over_limits(self, case: Case, now_s: float) -> Refused | None:
        """Those of its tenant."""
        ask, accounts = case.ask, self._accounts
        limits = accounts.limits(ask.tenant)
        quota, most = limits.max_inflight_tokens, limits.max_requests
        if most is not None and accounts.num_requests(ask.tenant) >= most:
            return self._refused(
                case, Reason.TENANT_REQUESTS, f"this tenant has {most} requests under way, as many as it may", None
            )
        if quota is not None and case.num_tokens > quota:
            problem = f"and the prompt come to {case.num_tokens} tokens, over this tenant's {quota}; ask for fewer"
            return Refused(ask.key, Reason.QUOTA, problem)
        wait_s = accounts.rate_wait_s(ask.tenant, ask.prompt_tokens + case.output_tokens, now_s)
        if not wait_s:
            return None
        return self._refused(
            case, Reason.TOKEN_RATE, f"this tenant's {limits.tokens_per_s:g} tokens/s are used up", wait_s
        )

    def refuse_to_queue(self, case: Case, now_s: float) -> Refused | None:
        lane, level = case.ask.lane, self._overload.level
        settings, queue = self._config.lane(lane), self._lanes[lane]
        drained_s = self._half_drained_s(lane, now_s)
        if level >= Level.REFUSE and lane is not Lane.INTERACTIVE:
            return self._refused(case, Reason.OVERLOAD, "overloaded: only interactive requests may wait", drained_s)
        if level >= Level.PAUSE_BULK and lane is Lane.BULK:
            return self._refused(case, Reason.BULK_PAUSED, "overloaded: bulk requests are paused", drained_s)
        if queue.num_waiting >= settings.max_queue:
            return self._refused(
                case, Reason.QUEUE_FULL, f"{queue.num_waiting} {lane} requests wait already", drained_s
            )
        wait_s = self._predict_wait_s(case, now_s)
        if wait_s is not None and wait_s > settings.max_wait_s:
            problem = f"it would wait about {wait_s:.3g} s; {lane} requests wait {settings.max_wait_s:g} s at most"
            return self._refused(case, Reason.WAIT, problem, wait_s - _PATIENCE * settings.max_wait_s)
        if (late := self.too_late(case, wait_s or 0.0, now_s)) is not None:
            return late
        if self._rng.random() < shed_probability(self._overload.saturation, settings.shed_from):
            return self._refused(case, Reason.SHED, "overloaded: some requests are refused", drained_s)
        return None

    def too_late(self, case: Case, wait_s: float, now_s: float) -> Refused | None:
        """Where this wait and its service would outlast its deadline.

        The emptier the deployment, the less is refused on a guess: how long an answer gets is known in the mean only,
        and one that is tried in vain costs others nothing while there is room. With nothing out at all everything is
        tried, or a rate once measured too low would never be measured again.
        """
        ask = case.ask
        if now_s < ask.deadline_s and self._out.num_requests == 0:
            return None
        trust = min(1.0, self._overload.saturation)
        service = self._estimator.service(
            ask.prompt_tokens, self._forecast.likely_output(ask.lane, ask.max_tokens, trust)
        )
        needed_s = wait_s + (service.total_s if service else 0.0)
        left_s = ask.deadline_s - now_s
        if 0 < left_s >= needed_s:
            return None
        problem = f"it has {max(0.0, left_s):.3g} s left and needs about {needed_s:.3g} s, {wait_s:.3g} s to wait"
        return self._refused(case, Reason.DEADLINE, f"{problem}; give it more time", needed_s - left_s)

    def _predict_wait_s(self, case: Case, now_s: float) -> float | None:
        rate = self._forecast.drain_per_s(now_s)
        if not rate:
            return None
        lane, tenant = case.ask.lane, case.ask.tenant
        queue, share = self._lanes[lane], self.share(lane)
        everything = sum(one.cost for one in self._lanes.values())
        longest_s = min(everything, (queue.cost + case.cost) / share) / rate
        if longest_s <= min(self._config.lane(lane).max_wait_s, 0.5 * (case.ask.deadline_s - now_s)):
            return longest_s  # nothing hangs on a better estimate, which is dearer
        weights = {one: self._accounts.weight(one) for one in (*queue.waiting_tenants(), tenant)}
        ahead = queue.cost_before(tenant, due_s(case.ask, self._config), weights[tenant] / sum(weights.values()))
        return min(everything, (ahead + case.cost) / share) / rate

    def _half_drained_s(self, lane: Lane, now_s: float) -> float | None:
        rate = self._forecast.drain_per_s(now_s)
        return 0.5 * self._lanes[lane].cost / self.share(lane) / rate if rate else None

    def share(self, lane: Lane) -> float:
        """Of the capacity, that this lane gets while the others have work as they have now."""
        own = self._config.lane(lane).weight
        others = sum(self._config.lane(one).weight for one in Lane if one is not lane and self._lanes[one].num_waiting)
        return own / (own + others)

    def _refused(self, case: Case, reason: Reason, problem: str, wait_s: float | None) -> Refused:
        """With a hint that is jittered, so that those who are refused together do not come back together."""
        base_s = _HINT_UNKNOWN_S if wait_s is None else min(_LONGEST_HINT_S, max(_SHORTEST_HINT_S, wait_s))
        hint_s = base_s * self._rng.uniform(1.0, 1.5)
        return Refused(case.ask.key, reason, f"{problem}; try again in {hint_s:.2g} s", hint_s)

    def gave_up(self, case: Case, now_s: float) -> Refused:
        """It has waited as long as it may."""
        lane = case.ask.lane
        drained_s = self._half_drained_s(lane, now_s)
        if now_s >= case.ask.deadline_s:
            return self._refused(case, Reason.DEADLINE, "its deadline has passed in the queue", drained_s)
        longest_s = self._config.lane(lane).max_wait_s
        return self._refused(case, Reason.WAIT, f"{lane} requests wait {longest_s:g} s at most", drained_s)
