"""Decides which requests are refused, why, and when they should return. Pure: time and randomness are passed in.

By default a request waits until its deadline: it is refused only where the queue's memory is used up, or where even the
fastest plausible service would miss the deadline. With `overload.shed` what would miss its lane's target is refused at
once. Retry hints follow from the measured rate at which requests leave, and are jittered, so that requests refused
together do not return together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config.admission import AdmissionConfig
from penstock.types import Lane
from router.admission.capacity import Outstanding
from router.admission.forecast import Forecast, ServiceEstimator
from router.admission.interface import AdmissionRequest, RefusalReason, Refused
from router.admission.lane_queue import LaneQueue, TrackedRequest, request_bytes
from router.admission.overload_policy import OverloadLevel, OverloadPolicy, shed_probability
from router.admission.tenant_accounts import TenantAccounts

_PATIENCE = 0.5  # share of a lane's target after which a request is due
_CERTAIN = (
    0.5  # refuse only if half of the predicted wait already misses the deadline: predictions may be twice too long
)
_TENANT_SHARE = 0.5  # of a lane's queue, for one tenant where there are several
_UNKNOWN_HINT_S = 1.0
_MIN_HINT_S = 0.1
_MAX_HINT_S = 600.0


def due_s(request: AdmissionRequest, config: AdmissionConfig) -> float:
    """Returns when a request is due; within its tenant and lane, earlier due requests go first."""
    return min(request.deadline_s, request.arrived_s + _PATIENCE * config.lane(request.lane).target_wait_s)


def expires_s(request: AdmissionRequest, config: AdmissionConfig, now_s: float) -> float:
    """Returns when a request that is queued now leaves unserved."""
    if not config.overload.shed:
        return request.deadline_s
    return min(request.deadline_s, now_s + config.lane(request.lane).target_wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalPolicy:
    """Judges requests by the state that `AdmissionPolicy` owns, without changing it."""

    config: AdmissionConfig
    rng: random.Random
    lanes: Mapping[Lane, LaneQueue]
    accounts: TenantAccounts
    forecast: Forecast
    estimator: ServiceEstimator
    overload: OverloadPolicy
    outstanding: Outstanding

    def over_limits(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        """Refuses a request beyond its tenant's limits."""
        request, accounts = tracked.request, self.accounts
        limits = accounts.limits(request.tenant)
        quota, most = limits.max_inflight_tokens, limits.max_requests
        if most is not None and accounts.num_requests(request.tenant) >= most:
            problem = f"this tenant has {most} requests in flight, its limit"
            request_s = self.forecast.request_s()
            next_s = None if request_s is None else request_s / most  # until one of them ends
            return self._refused(tracked, RefusalReason.TENANT_REQUESTS, problem, next_s)
        if quota is not None and tracked.num_tokens > quota:
            problem = f"and the prompt come to {tracked.num_tokens} tokens, over this tenant's {quota}; ask for fewer"
            return Refused(request.key, RefusalReason.QUOTA, problem)
        wait_s = accounts.rate_wait_s(request.tenant, request.prompt_tokens + tracked.output_tokens, now_s)
        if not wait_s:
            return None
        problem = f"this tenant's {limits.tokens_per_s:g} tokens/s are used up"
        return self._refused(tracked, RefusalReason.TOKEN_RATE, problem, wait_s)

    def refuse_to_queue(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        """Refuses a request that a full queue, its deadline or, as an option, overload keeps out of the queue."""
        if (full := self._queue_full(tracked, now_s)) is not None:
            return full
        if self.config.overload.shed:
            return self._shed(tracked, now_s)
        wait_s = self._predict_wait_s(tracked, self.forecast.fastest_per_s(now_s), now_s)
        return self.too_late(tracked, _CERTAIN * (wait_s or 0.0), now_s)

    def _queue_full(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        request = tracked.request
        settings, queue = self.config.lane(request.lane), self.lanes[request.lane]
        own, num_bytes = queue.use_of(request.tenant), request_bytes(request.prompt_tokens)
        if not queue.num_waiting:
            return None
        for used, share, whose in (
            (queue.total, 1.0, ""),
            (own, _TENANT_SHARE if request.tenant else 1.0, " of this tenant"),
        ):
            limit = (
                f"{used.num_requests} {request.lane} requests{whose} are queued already"
                if used.num_requests + 1 > share * settings.max_queue
                else f"the queued {request.lane} requests{whose} take {used.num_bytes >> 20} MiB already"
                if used.num_bytes + num_bytes > share * settings.max_queue_bytes
                else ""
            )
            if limit:
                drained_s = self._half_drained_s(request.lane, now_s)
                return self._refused(tracked, RefusalReason.QUEUE_FULL, f"{limit}, the lane's limit", drained_s)
        return None

    def _shed(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        lane, level = tracked.request.lane, self.overload.level
        settings = self.config.lane(lane)
        drained_s = self._half_drained_s(lane, now_s)
        if level >= OverloadLevel.REFUSE and lane is not Lane.INTERACTIVE:
            problem = "overloaded: only interactive requests may wait"
            return self._refused(tracked, RefusalReason.OVERLOAD, problem, drained_s)
        if level >= OverloadLevel.PAUSE_BULK and lane is Lane.BULK:
            return self._refused(tracked, RefusalReason.BULK_PAUSED, "overloaded: bulk requests are paused", drained_s)
        wait_s = self._predict_wait_s(tracked, self.forecast.drain_per_s(now_s), now_s)
        if wait_s is not None and wait_s > settings.target_wait_s:
            problem = f"it would wait about {wait_s:.3g} s; {lane} requests wait {settings.target_wait_s:g} s at most"
            return self._refused(tracked, RefusalReason.WAIT, problem, wait_s - _PATIENCE * settings.target_wait_s)
        if (late := self.too_late(tracked, wait_s or 0.0, now_s)) is not None:
            return late
        if self.rng.random() < shed_probability(self.overload.saturation, settings.shed_from):
            return self._refused(tracked, RefusalReason.SHED, "overloaded: some requests are refused", drained_s)
        return None

    def too_late(self, tracked: TrackedRequest, wait_s: float, now_s: float) -> Refused | None:
        """Refuses a request whose wait and service would outlast its deadline.

        The emptier the deployment, the less is refused on an estimate: only the mean length of answers is known, and a
        failed attempt costs others nothing while there is room. With nothing outstanding everything is tried, or a rate
        once measured too low would never be measured again.
        """
        request = tracked.request
        if now_s < request.deadline_s and self.outstanding.num_requests == 0:
            return None
        trust = min(1.0, self.overload.saturation)
        service = self.estimator.service(
            request.prompt_tokens, self.forecast.trusted_output_tokens(request.lane, request.max_tokens, trust)
        )
        needed_s = wait_s + (service.total_s if service else 0.0)
        left_s = request.deadline_s - now_s
        if 0 < left_s >= needed_s:
            return None
        problem = f"it has {max(0.0, left_s):.3g} s left and needs about {needed_s:.3g} s, {wait_s:.3g} s to wait"
        return self._refused(tracked, RefusalReason.DEADLINE, f"{problem}; give it more time", needed_s - left_s)

    def expire(self, tracked: TrackedRequest, now_s: float) -> Refused:
        """Refuses a request that has waited as long as it may."""
        lane = tracked.request.lane
        drained_s = self._half_drained_s(lane, now_s)
        if now_s >= tracked.request.deadline_s:
            problem = "its deadline has passed in the queue"
            return self._refused(tracked, RefusalReason.DEADLINE, problem, drained_s)
        target_s = self.config.lane(lane).target_wait_s
        return self._refused(tracked, RefusalReason.WAIT, f"{lane} requests wait {target_s:g} s at most", drained_s)

    def hint_s(self, lane: Lane, now_s: float) -> float:
        """Returns when a request of the lane should be tried again where the router as a whole is full."""
        return self._jittered(self._half_drained_s(lane, now_s))

    def share(self, lane: Lane) -> float:
        """Returns the share of the capacity that this lane gets while the others have the work they have now."""
        own = self.config.lane(lane).weight
        others = sum(
            self.config.lane(other).weight for other in Lane if other is not lane and self.lanes[other].num_waiting
        )
        return own / (own + others)

    def _predict_wait_s(self, tracked: TrackedRequest, rate: float | None, now_s: float) -> float | None:
        """Returns the wait at a drain rate in weighted tokens a second, None where that is unknown."""
        if not rate:
            return None
        request = tracked.request
        lane, tenant = request.lane, request.tenant
        queue, share = self.lanes[lane], self.share(lane)
        everything = sum(queued.cost for queued in self.lanes.values())
        longest_s = min(everything, (queue.cost + tracked.cost) / share) / rate
        target_s = self.config.lane(lane).target_wait_s if self.config.overload.shed else math.inf
        if longest_s <= min(target_s, 0.5 * (request.deadline_s - now_s)):
            return longest_s  # a better estimate costs more and would not change the decision
        weights = {other: self.accounts.weight(other) for other in (*queue.waiting_tenants(), tenant)}
        ahead = queue.cost_before(tenant, due_s(request, self.config), weights[tenant] / sum(weights.values()))
        return min(everything, (ahead + tracked.cost) / share) / rate

    def _half_drained_s(self, lane: Lane, now_s: float) -> float | None:
        rate = self.forecast.drain_per_s(now_s)
        return 0.5 * self.lanes[lane].cost / self.share(lane) / rate if rate else None

    def _refused(self, tracked: TrackedRequest, reason: RefusalReason, problem: str, wait_s: float | None) -> Refused:
        hint_s = self._jittered(wait_s)
        return Refused(tracked.request.key, reason, f"{problem}; try again in {hint_s:.2g} s", hint_s)

    def _jittered(self, wait_s: float | None) -> float:
        base_s = _UNKNOWN_HINT_S if wait_s is None else min(_MAX_HINT_S, max(_MIN_HINT_S, wait_s))
        return base_s * self.rng.uniform(1.0, 1.5)
