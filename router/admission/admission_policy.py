"""Decides which requests go to the workers, which wait, and which are refused before any work is done. Pure.

The capacity that the workers report bounds the requests at the workers. All others wait in the router until their
deadline, in a queue that is bounded in requests and bytes. The caller passes in time and randomness, reports requests
that end, and calls `poll` to learn which requests go next. Lanes share the capacity by weight, tenants share a lane by
weight (`router.admission.fairness`), and within a tenant the request that is due first goes first. What bulk requests
hold at the workers takes no room from other lanes, to which they give way there. A full queue refuses new requests and
never drops queued ones, so a queued request is served within a bounded time while capacity frees up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from penstock.config.admission import AdmissionConfig, TenantLimits
from penstock.types import Lane
from router.admission.capacity import FleetState, Outstanding, has_room
from router.admission.fairness import FairCounters
from router.admission.forecast import Forecast, ServiceEstimator
from router.admission.interface import (
    OWN_FAULT,
    AdmissionAnswer,
    AdmissionRequest,
    Dispatched,
    Queued,
    Refused,
    RequestUsage,
)
from router.admission.lane_queue import LaneQueue, QueueEntry, TrackedRequest
from router.admission.overload_policy import OverloadLevel, OverloadPolicy, fleet_pressure, worst
from router.admission.refusal_policy import RefusalPolicy, due_s, expires_s
from router.admission.tenant_accounts import TenantAccounts

OPEN_ENDED_TOKENS = 4096  # a request without max_tokens is charged this many output tokens at a time, as it grows
_WAIT_FOR_WORKERS_S = 30.0  # without any worker, requests stay queued this long while a successor loads its weights
_OBSERVE_INTERVAL_S = 0.01  # minimum time between two measurements of saturation


class AdmissionPolicy:
    """Owns every request from its admission to its end. Each leaves exactly once; all counts then return to zero."""

    def __init__(
        self,
        config: AdmissionConfig,
        rng: random.Random,
        *,
        limits_of: Callable[[str], TenantLimits] | None = None,
        estimator: ServiceEstimator | None = None,
    ) -> None:
        """`limits_of` returns a tenant's limits (default: those of the configuration); `estimator` predicts service
        times (default: an estimator that learns from ended requests).
        """
        self._config = config
        self._lanes = {lane: LaneQueue() for lane in Lane}
        self._turns = FairCounters[Lane]()
        self._tracked: dict[int, TrackedRequest] = {}
        self.accounts = TenantAccounts(limits_of or (lambda tenant: config.tenant))
        self._forecast = Forecast(config)
        self._overload = OverloadPolicy(config.overload)
        self._observed_s = float("-inf")
        self._resumes_s = float("-inf")  # queued requests stay queued until then, unless a worker appears
        self._fleet: FleetState | None = None
        self.outstanding = Outstanding()
        self._outstanding_others = Outstanding()  # those that are not bulk
        self._refusals = RefusalPolicy(
            config=config,
            rng=rng,
            lanes=self._lanes,
            accounts=self.accounts,
            forecast=self._forecast,
            estimator=estimator or self._forecast,
            overload=self._overload,
            outstanding=self.outstanding,
        )

    @property
    def level(self) -> OverloadLevel:
        return self._overload.level

    @property
    def saturation(self) -> float:
        return self._overload.saturation

    @property
    def num_waiting(self) -> int:
        return sum([queue.num_waiting for queue in self._lanes.values()])

    @property
    def num_bulk_sequences(self) -> int:
        """Returns the bulk sequences at the workers."""
        return self.outstanding.num_sequences - self._outstanding_others.num_sequences

    @property
    def num_inside(self) -> int:
        """Returns the number of requests that are queued or at the workers."""
        return len(self._tracked)

    def holds(self, key: int) -> bool:
        """Returns whether the request has been admitted and has not left."""
        return key in self._tracked

    def num_waiting_in(self, lane: Lane) -> int:
        return self._lanes[lane].num_waiting

    def queue_bytes(self, lane: Lane) -> int:
        """Returns the estimated memory of the lane's queued requests."""
        return self._lanes[lane].total.num_bytes

    @property
    def waiting_tokens(self) -> int:
        """Returns the prompt tokens of all queued requests."""
        return sum(queue.total.prompt_tokens for queue in self._lanes.values())

    def retry_hint_s(self, lane: Lane, now_s: float) -> float:
        """Returns in how many seconds to retry a request that is refused because the router itself is full."""
        return self._refusals.hint_s(lane, now_s)

    def inflight_tokens(self, tenant: str) -> int:
        """Returns the most tokens of KV that the tenant's requests at the workers can hold, as charged so far."""
        return self.accounts.inflight_tokens(tenant)

    def on_fleet(self, fleet: FleetState | None, now_s: float) -> None:
        """Updates the fleet's state; None if no worker takes requests. Call `poll` afterwards."""
        if fleet is not None:
            self._resumes_s = float("-inf")
        elif self._forecast.fleet is not None:
            self._resumes_s = now_s + _WAIT_FOR_WORKERS_S
        self._fleet = fleet
        self._forecast.fleet = fleet and fleet.without_bulk()
        self._observe(now_s)

    def prepay(self, tenant: str, num_tokens: int, now_s: float) -> float:
        """Charges the tenant's rate for work that is done before admission.

        Returns 0, or, if the rate lacks the tokens, charges nothing and returns the seconds until it has them.
        """
        wait_s = self.accounts.rate_wait_s(tenant, num_tokens, now_s)
        if not wait_s:
            self.accounts.spend(tenant, num_tokens, now_s)
        return wait_s

    def repay(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Refunds prepaid tokens; charges more if `num_tokens` is negative."""
        self.accounts.spend(tenant, -num_tokens, now_s)

    def offer(self, request: AdmissionRequest, now_s: float) -> AdmissionAnswer:
        """Answers an arriving request. `poll` later returns a request that was queued, unless `end` removes it."""
        assert request.key not in self._tracked
        self._observe_if_due(now_s)
        self.accounts.spend(request.tenant, -request.prepaid_tokens, now_s)  # the charge below includes them again
        tracked = self._track(request)
        refused = self._refusals.over_limits(tracked, now_s)
        at_once = False
        if refused is None:
            at_once = self.accounts.fits(request.tenant, tracked.num_tokens) and self._has_room(request)
            at_once = at_once and (not self.num_waiting or self._next(_lanes_before(request.lane)) is None)
            if at_once:
                refused = self._refusals.too_late(tracked, 0.0, now_s)
            else:
                refused = self._refusals.refuse_to_queue(tracked, now_s)
        if refused is not None:
            if refused.reason in OWN_FAULT:
                self.accounts.spend(request.tenant, request.prepaid_tokens, now_s)
            return refused
        self._tracked[request.key] = tracked
        self.accounts.enter(request.tenant)
        self.accounts.spend(request.tenant, request.prompt_tokens + tracked.output_tokens, now_s)
        if at_once:
            return self._send(tracked, now_s)
        self._push(tracked, now_s)
        return Queued(request.key)

    def poll(self, now_s: float) -> list[Dispatched | Refused]:
        """Removes queued requests that expired or that the workers have room for, and returns the answers to them."""
        answers: list[Dispatched | Refused] = []
        for queue in self._lanes.values():
            for expired in queue.expired(now_s):
                tracked = self._tracked[expired.key]
                self._drop(tracked, now_s)
                answers.append(self._refusals.expire(tracked, now_s))
        if now_s >= self._resumes_s:
            self._resumes_s = float("-inf")
        lanes = list(Lane)
        while self._resumes_s < now_s and self._others_have_room(1, 0) and (entry := self._next(lanes)) is not None:
            tracked = self._tracked[entry.key]
            if (late := self._refusals.too_late(tracked, 0.0, now_s)) is not None:
                self._drop(tracked, now_s)
                answers.append(late)
            elif self._has_room(tracked.request):
                answers.append(self._send(tracked, now_s))
            elif tracked.request.lane is Lane.BULK:
                lanes.remove(Lane.BULK)  # others do not wait for it
                self._turns.deactivate(Lane.BULK)
            else:
                break
        self._observe_if_due(now_s)
        return answers

    def next_poll_s(self) -> float | None:
        """Returns when to call `poll` if nothing changes before; None if only a change makes it necessary."""
        at_s = min((at for queue in self._lanes.values() if (at := queue.next_expiry_s()) is not None), default=None)
        return at_s if at_s is None or self._resumes_s < 0.0 else min(at_s, self._resumes_s)

    def start(self, key: int) -> None:
        """Records a request's first token. Call `poll` afterwards. Idempotent."""
        tracked = self._tracked[key]
        if not tracked.started:
            tracked.started = True
            for outstanding in self._outstanding_with(tracked.request):
                outstanding.start(tracked.request.prompt_tokens)

    def grow(self, key: int, output_tokens: int) -> None:
        """Charges more KV to an open-ended request whose sequences have emitted this many tokens in total."""
        tracked = self._tracked[key]
        request = tracked.request
        charged = tracked.num_tokens - request.prompt_tokens
        if not request.open_ended or output_tokens < charged:
            return
        added = OPEN_ENDED_TOKENS * (1 + (output_tokens - charged) // OPEN_ENDED_TOKENS)
        added = min(added, request.max_tokens * request.num_sequences - charged)
        tracked.num_tokens += added
        self.accounts.send(request.tenant, added)

    def end(self, key: int, used: RequestUsage | None, now_s: float) -> None:
        """Removes a queued or dispatched request. `used` is None if its usage is unknown. Call `poll` afterwards."""
        tracked = self._tracked[key]
        if tracked.entry is not None:
            self._drop(tracked, now_s)
            return
        request = tracked.request
        self.start(key)
        for outstanding in self._outstanding_with(request):
            outstanding.end(request.num_sequences)
        self.accounts.end(request.tenant, tracked.num_tokens)
        if used is not None:
            if used.whole:
                self._forecast.learn(request, tracked.cost, tracked.sent_s, used, now_s)
            self._settle(tracked, used.output_tokens, now_s)
        self._forget(tracked)

    def _track(self, request: AdmissionRequest) -> TrackedRequest:
        expected = self._forecast.output_tokens(request.lane, request.max_tokens) * request.num_sequences
        cost = request.prompt_tokens + self._config.output_weight * expected
        charged = min(request.max_tokens, OPEN_ENDED_TOKENS) if request.open_ended else request.max_tokens
        return TrackedRequest(request, expected, cost, request.prompt_tokens + charged * request.num_sequences)

    # The queue.

    def _push(self, tracked: TrackedRequest, now_s: float) -> None:
        request = tracked.request
        tracked.contended = True
        tracked.entry = QueueEntry(
            request.key,
            request.tenant,
            due_s(request, self._config),
            expires_s(request, self._config, now_s),
            tracked.cost,
            tracked.num_tokens,
            request.prompt_tokens,
        )
        self._lanes[request.lane].push(tracked.entry)
        self._forecast.drain.observe(0.0, now_s, backlogged=True)

    def _next(self, lanes: Iterable[Lane]) -> QueueEntry | None:
        """Returns the next entry of the lane that was served least by weight, among those with an entry that fits."""
        best: tuple[float, QueueEntry] | None = None
        for lane in lanes:
            queue = self._lanes[lane]
            entry = queue.next(self._entry_fits) if queue.num_waiting else None
            if entry is None:
                self._turns.deactivate(lane)
                continue
            self._turns.activate(lane)
            if best is None or self._turns[lane] < best[0]:
                best = (self._turns[lane], entry)
        return best[1] if best else None

    def _entry_fits(self, entry: QueueEntry) -> bool:
        return self.accounts.fits(entry.tenant, entry.num_tokens)

    def _has_room(self, request: AdmissionRequest) -> bool:
        if request.lane is not Lane.BULK:
            return self._others_have_room(request.num_sequences, request.prompt_tokens)
        share, num_sequences = self._forecast.uncached_share, request.num_sequences
        return has_room(self._fleet, self.outstanding, num_sequences, request.prompt_tokens, share, self._config)

    def _others_have_room(self, num_sequences: int, prompt_tokens: int) -> bool:
        """Returns whether a request that is not bulk may be dispatched. There is never more room for a bulk request."""
        fleet, share = self._forecast.fleet, self._forecast.uncached_share
        return has_room(fleet, self._outstanding_others, num_sequences, prompt_tokens, share, self._config)

    def _outstanding_with(self, request: AdmissionRequest) -> tuple[Outstanding, ...]:
        """Returns the counts to which the request belongs."""
        return (self.outstanding,) if request.lane is Lane.BULK else (self.outstanding, self._outstanding_others)

    def _send(self, tracked: TrackedRequest, now_s: float) -> Dispatched:
        request = tracked.request
        if tracked.entry is not None:
            self._unqueue(tracked, tracked.cost, now_s)
        self._lanes[request.lane].tenants.serve(request.tenant, tracked.cost / self.accounts.weight(request.tenant))
        self._turns.serve(request.lane, tracked.cost / self._config.lane(request.lane).weight)
        tracked.sent_s = now_s
        for outstanding in self._outstanding_with(request):
            outstanding.send(request.num_sequences, request.prompt_tokens)
        if request.lane is Lane.BULK:
            self.start(request.key)  # others need not wait for its prompt, which yields to theirs at the workers
        self.accounts.send(request.tenant, tracked.num_tokens)
        max_tokens, overload_max_tokens = request.max_tokens, self._config.overload.max_tokens
        if overload_max_tokens is not None and self._overload.level >= OverloadLevel.SHORTEN:
            max_tokens = min(max_tokens, overload_max_tokens)
        return Dispatched(request.key, max_tokens, max(0.0, now_s - request.arrived_s))

    def _unqueue(self, tracked: TrackedRequest, served: float, now_s: float) -> None:
        assert tracked.entry is not None
        self._lanes[tracked.request.lane].remove(tracked.entry)
        tracked.entry = None
        self._forecast.drain.observe(served, now_s, backlogged=self.num_waiting > 0)

    def _drop(self, tracked: TrackedRequest, now_s: float) -> None:
        """Removes a request from the queue unserved and refunds its charge."""
        self._unqueue(tracked, 0.0, now_s)
        request = tracked.request
        self.accounts.spend(request.tenant, -(request.prompt_tokens + tracked.output_tokens), now_s)
        self._forget(tracked)

    def _forget(self, tracked: TrackedRequest) -> None:
        del self._tracked[tracked.request.key]
        self.accounts.leave(tracked.request.tenant)

    def _settle(self, tracked: TrackedRequest, output_tokens: int, now_s: float) -> None:
        """Corrects what was charged by estimate to what was used."""
        request, difference = tracked.request, output_tokens - tracked.output_tokens
        cost = self._config.output_weight * difference
        tenants, weight = self._lanes[request.lane].tenants, self.accounts.weight(request.tenant)
        tenants.settle(request.tenant, cost / weight, tracked.contended)
        self._turns.settle(request.lane, cost / self._config.lane(request.lane).weight, tracked.contended)
        self.accounts.spend(request.tenant, difference, now_s)

    # Overload.

    def _observe_if_due(self, now_s: float) -> None:
        if now_s - self._observed_s >= _OBSERVE_INTERVAL_S:
            self._observe(now_s)

    def _observe(self, now_s: float) -> None:
        self._observed_s = now_s
        saturation = worst(self._signals(now_s))
        if self._forecast.fleet is None and (saturation or 0.0) < self._overload.saturation:
            saturation = None  # the workers' signals are missing, which must not pass for lower load
        self._overload.observe(saturation, now_s)

    def _signals(self, now_s: float) -> Iterator[float | None]:
        """Yields signals of saturation, without the bulk queue: bulk requests are meant to wait."""
        rate = self._forecast.drain_per_s(now_s)
        for lane in (Lane.INTERACTIVE, Lane.STANDARD):
            queue, settings = self._lanes[lane], self._config.lane(lane)
            yield max(queue.num_waiting / settings.max_queue, queue.total.num_bytes / settings.max_queue_bytes)
            if rate:
                yield queue.cost / self._refusals.share(lane) / rate / settings.target_wait_s
        if self._forecast.fleet is not None:
            yield fleet_pressure(self._forecast.fleet, self._config)


def _lanes_before(lane: Lane) -> Iterable[Lane]:
    """Returns the lanes whose queued requests go before a new one of `lane`."""
    return Lane if lane is Lane.BULK else (Lane.INTERACTIVE, Lane.STANDARD)
