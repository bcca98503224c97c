"""Decides which requests are refused, why, and when to retry them. Pure: time and randomness are passed in.

By default a request waits until its deadline. It is refused only if its tenant's limits or the queue are exhausted, or
if even the fastest plausible service would miss the deadline. With `overload.shed`, a request that would miss its
lane's target is refused at once. Retry hints follow from the measured drain rate of the queue and are jittered, so that
requests refused together do not return together.
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
_WAIT_DISCOUNT = 0.5  # predicted waits may be twice too long: refuse only if half of the wait misses the deadline
_TENANT_SHARE = 0.5  # share of a lane's queue that one named tenant may fill
_UNKNOWN_HINT_S = 1.0
_MIN_HINT_S = 0.1
_MAX_HINT_S = 600.0


def due_s(request: AdmissionRequest, config: AdmissionConfig) -> float:
    """Returns when a request is due. Within a tenant and lane, the request that is due first goes first."""
    return min(request.deadline_s, request.arrived_s + _PATIENCE * config.lane(request.lane).target_wait_s)


def expires_s(request: AdmissionRequest, config: AdmissionConfig, now_s: float) -> float:
    """Returns when a request that is queued now leaves the queue unserved."""
    if not config.overload.shed:
        return request.deadline_s
    return min(request.deadline_s, now_s + config.lane(request.lane).target_wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalPolicy:
    """Decides refusals from the state that `AdmissionPolicy` owns, without changing that state."""

    config: AdmissionConfig
    rng: random.Random
    lanes: Mapping[Lane, LaneQueue]
    accounts: TenantAccounts
    forecast: Forecast
    estimator: ServiceEstimator
    overload: OverloadPolicy
    outstanding: Outstanding

    def over_limits(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        """Refuses a request that exceeds its tenant's limits."""
        request, accounts = tracked.request, self.accounts
        limits = accounts.limits(request.tenant)
        quota, max_requests = limits.max_inflight_tokens, limits.max_requests
        if max_requests is not None and accounts.num_requests(request.tenant) >= max_requests:
            problem = f"this tenant has reached its limit of {max_requests} requests in flight"
            request_s = self.forecast.request_s()
            next_s = None if request_s is None else request_s / max_requests  # until one of them ends
            return self._refused(tracked, RefusalReason.TENANT_REQUESTS, problem, next_s)
        if quota is not None and tracked.num_tokens > quota:
            problem = (
                f"prompt and output come to {tracked.num_tokens} tokens, more than this tenant's quota of {quota}; "
                "lower max_tokens or shorten the prompt"
            )
            return Refused(request.key, RefusalReason.QUOTA, problem)
        wait_s = accounts.rate_wait_s(request.tenant, request.prompt_tokens + tracked.output_tokens, now_s)
        if not wait_s:
            return None
        problem = f"this tenant has used up its rate of {limits.tokens_per_s:g} tokens/s"
        return self._refused(tracked, RefusalReason.TOKEN_RATE, problem, wait_s)

    def refuse_to_queue(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        """Refuses a request that would have to queue, if the queue is full, its deadline is too near or, with
        `overload.shed`, the router is overloaded.
        """
        if (full := self._queue_full(tracked, now_s)) is not None:
            return full
        if self.config.overload.shed:
            return self._shed(tracked, now_s)
        wait_s = self._predict_wait_s(tracked, self.forecast.fastest_per_s(now_s), now_s)
        return self.too_late(tracked, _WAIT_DISCOUNT * (wait_s or 0.0), now_s)

    def _queue_full(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        request = tracked.request
        settings, queue = self.config.lane(request.lane), self.lanes[request.lane]
        own, num_bytes = queue.use_of(request.tenant), request_bytes(request.prompt_tokens)
        if not queue.num_waiting:
            return None
        for used, share, limited in (
            (queue.total, 1.0, f"the queue of {request.lane} requests"),
            (
                own,
                _TENANT_SHARE if request.tenant else 1.0,
                f"this tenant's part of the queue of {request.lane} requests",
            ),
        ):
            content = (
                f"{used.num_requests} requests"
                if used.num_requests + 1 > share * settings.max_queue
                else f"{used.num_bytes >> 20} MiB of requests"
                if used.num_bytes + num_bytes > share * settings.max_queue_bytes
                else ""
            )
            if content:
                problem = f"{limited} is full: it holds {content}"
                drained_s = self._half_drained_s(request.lane, now_s)
                return self._refused(tracked, RefusalReason.QUEUE_FULL, problem, drained_s)
        return None

    def _shed(self, tracked: TrackedRequest, now_s: float) -> Refused | None:
        lane, level = tracked.request.lane, self.overload.level
        settings = self.config.lane(lane)
        drained_s = self._half_drained_s(lane, now_s)
        if level >= OverloadLevel.REFUSE and lane is not Lane.INTERACTIVE:
            problem = "this router is overloaded and queues only interactive requests"
            return self._refused(tracked, RefusalReason.OVERLOAD, problem, drained_s)
        if level >= OverloadLevel.PAUSE_BULK and lane is Lane.BULK:
            problem = "this router is overloaded and queues no bulk requests"
            return self._refused(tracked, RefusalReason.BULK_PAUSED, problem, drained_s)
        wait_s = self._predict_wait_s(tracked, self.forecast.drain_per_s(now_s), now_s)
        if wait_s is not None and wait_s > settings.target_wait_s:
            limit = f"{lane} requests may wait at most {settings.target_wait_s:g} s"
            problem = f"this request would wait about {wait_s:.3g} s in the queue; {limit}"
            return self._refused(tracked, RefusalReason.WAIT, problem, wait_s - _PATIENCE * settings.target_wait_s)
        if (late := self.too_late(tracked, wait_s or 0.0, now_s)) is not None:
            return late
        if self.rng.random() < shed_probability(self.overload.saturation, settings.shed_from):
            problem = "this router is overloaded and refuses some requests at random"
            return self._refused(tracked, RefusalReason.SHED, problem, drained_s)
        return None

    def too_late(self, tracked: TrackedRequest, wait_s: float, now_s: float) -> Refused | None:
        """Refuses a request whose wait and service would end after its deadline.

        The emptier the deployment, the shorter an output is assumed: only the mean length of outputs is known, and
        while there is room a request that misses its deadline costs others nothing. With nothing outstanding, every
        request is tried; otherwise a rate once measured too low would never be measured again.
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
        problem = (
            f"this request has {max(0.0, left_s):.3g} s left until its deadline and needs about {needed_s:.3g} s, "
            f"{wait_s:.3g} s of them in the queue; set a longer timeout"
        )
        return self._refused(tracked, RefusalReason.DEADLINE, problem, needed_s - left_s)

    def expire(self, tracked: TrackedRequest, now_s: float) -> Refused:
        """Refuses a request that has waited in the queue for as long as it may."""
        lane = tracked.request.lane
        drained_s = self._half_drained_s(lane, now_s)
        if now_s >= tracked.request.deadline_s:
            problem = "the request's deadline passed while it was queued"
            return self._refused(tracked, RefusalReason.DEADLINE, problem, drained_s)
        problem = f"{lane} requests may wait at most {self.config.lane(lane).target_wait_s:g} s in the queue"
        return self._refused(tracked, RefusalReason.WAIT, problem, drained_s)

    def hint_s(self, lane: Lane, now_s: float) -> float:
        """Returns in how many seconds to retry a request of the lane that is refused because the router is full."""
        return self._jittered(self._half_drained_s(lane, now_s))

    def share(self, lane: Lane) -> float:
        """Returns the share of the capacity that this lane gets, given which other lanes have queued requests now."""
        own = self.config.lane(lane).weight
        others = sum(
            self.config.lane(other).weight for other in Lane if other is not lane and self.lanes[other].num_waiting
        )
        return own / (own + others)

    def _predict_wait_s(self, tracked: TrackedRequest, rate: float | None, now_s: float) -> float | None:
        """Returns the wait at a drain rate in weighted tokens per second, or None if the rate is unknown."""
        if not rate:
            return None
        request = tracked.request
        lane, tenant = request.lane, request.tenant
        queue, share = self.lanes[lane], self.share(lane)
        everything = sum(queued.cost for queued in self.lanes.values())
        longest_s = min(everything, (queue.cost + tracked.cost) / share) / rate
        target_s = self.config.lane(lane).target_wait_s if self.config.overload.shed else math.inf
        if longest_s <= min(target_s, 0.5 * (request.deadline_s - now_s)):
            return longest_s  # an upper bound suffices here: a closer estimate would not change the decision
        weights = {other: self.accounts.weight(other) for other in (*queue.waiting_tenants(), tenant)}
        ahead = queue.cost_before(tenant, due_s(request, self.config), weights[tenant] / sum(weights.values()))
        return min(everything, (ahead + tracked.cost) / share) / rate

    def _half_drained_s(self, lane: Lane, now_s: float) -> float | None:
        """Returns how long half of the lane's queue takes to drain, or None if the drain rate is unknown."""
        rate = self.forecast.drain_per_s(now_s)
        return 0.5 * self.lanes[lane].cost / self.share(lane) / rate if rate else None

    def _refused(self, tracked: TrackedRequest, reason: RefusalReason, problem: str, wait_s: float | None) -> Refused:
        hint_s = self._jittered(wait_s)
        return Refused(tracked.request.key, reason, f"{problem}; try again in {hint_s:.3g} s", hint_s)

    def _jittered(self, wait_s: float | None) -> float:
        base_s = _UNKNOWN_HINT_S if wait_s is None else min(_MAX_HINT_S, max(_MIN_HINT_S, wait_s))
        return base_s * self.rng.uniform(1.0, 1.5)
