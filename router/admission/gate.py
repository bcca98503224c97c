"""Runs `AdmissionPolicy` on the event loop: a request passes at once, waits here for its turn, or is refused.

Owns the futures of waiting requests and the timer for the next one to expire. While there is room, a request passes
without a wait, a timer or another task.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType

from penstock.client.retry import RetryBudget
from penstock.config import RouterConfig
from penstock.config.admission import TenantLimits
from penstock.errors import Overloaded
from penstock.types import Epoch, Lane
from router.admission.admission_policy import OPEN_ENDED_TOKENS, AdmissionPolicy
from router.admission.capacity import FleetState
from router.admission.fleet_summary import (
    PeerSequenceEstimate,
    num_bulk_reported,
    num_reported,
    summarize_fleet,
)
from router.admission.interface import (
    NOTHING_USED,
    AdmissionRequest,
    Dispatched,
    Queued,
    RefusalReason,
    Refused,
    RequestUsage,
)
from router.admission.overload_policy import OverloadLevel
from router.fleet.tenant_use import TenantUse
from router.fleet.worker_fleet import WorkerFleet
from router.metrics.admission_metrics import AdmissionMetrics
from router.prepared_request import PreparedRequest

_SUMMARY_INTERVAL_S = 0.02  # minimum time between two summaries of the workers' reports


class AdmissionGate:
    """Admits every request of a router and releases what it held when it ends. Implements `QuotaExchange`."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: WorkerFleet,
        metrics: AdmissionMetrics,
        rng: random.Random,
        limits_of: Callable[[str], TenantLimits],
    ) -> None:
        self._rng = rng
        self.admission = AdmissionPolicy(config.admission, rng, limits_of=limits_of)
        self.retries = RetryBudget(config.admission.retry_share, config.admission.retry_reserve)
        self._max_inside = config.max_inflight
        self._fleet = fleet
        self._metrics = metrics
        self._peer_sequences = PeerSequenceEstimate()
        self._peer_bulk = PeerSequenceEstimate()
        self._waiters: dict[int, asyncio.Future[Dispatched | Refused]] = {}
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._expiry_s = 0.0
        self._report_timer: asyncio.TimerHandle | None = None  # set while a poll after a report is due
        self._summarized_s = 0.0
        self._last_key = 0
        fleet.watch_loads(self._on_load)
        self.admission.accounts.watch(fleet.peers.note_change)

    def pass_through(self, request: PreparedRequest) -> AdmissionSlot:
        """Returns a slot for the request, which the caller then enters."""
        self._last_key += 1
        admission_request = AdmissionRequest(
            key=self._last_key,
            lane=request.lane,
            tenant=request.tenant,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            arrived_s=request.accepted_s,
            deadline_s=request.deadline_s,
            num_sequences=request.sampling.n,
            prepaid_tokens=request.prepaid_tokens,
            open_ended=request.open_ended,
        )
        return AdmissionSlot(self, request, admission_request)

    def prepay(self, tenant: str, lane: Lane, num_tokens: int) -> None:
        """Charges the tenant's rate before work is done for it. Raises Overloaded if the rate lacks the tokens."""
        wait_s = self.admission.prepay(tenant, num_tokens, time.monotonic())
        if wait_s:
            self._metrics.refused(lane, RefusalReason.TOKEN_RATE)
            hint_s = wait_s * self._rng.uniform(1.0, 1.5)
            raise Overloaded(
                f"this prompt needs about {num_tokens} tokens, more than this tenant's rate of tokens/s has left; "
                f"try again in {math.ceil(hint_s)} s",
                hint_s,
            )

    def repay(self, tenant: str, num_tokens: int) -> None:
        """Refunds prepaid tokens; charges more if `num_tokens` is negative."""
        self.admission.repay(tenant, num_tokens, time.monotonic())

    async def enter(self, request: AdmissionRequest) -> Dispatched:
        """Returns once the request may be dispatched. Raises Overloaded, DeadlineExceeded or InvalidInput."""
        now_s = time.monotonic()
        self._refresh(now_s)
        if self.admission.num_inside >= self._max_inside:
            self._metrics.refused(request.lane, "max_inflight")
            self.repay(request.tenant, request.prepaid_tokens)
            hint_s = self.admission.retry_hint_s(request.lane, now_s)
            problem = f"this router has reached its limit of {self._max_inside} requests in flight"
            raise Overloaded(f"{problem}; try again in {hint_s:.3g} s", hint_s)
        answer = self.admission.offer(request, now_s)
        if isinstance(answer, Queued):
            answer = await self._wait(request)
        if isinstance(answer, Refused):
            self._metrics.refused(request.lane, answer.reason)
            raise answer.error()
        self._metrics.passed(request.lane, answer.waited_s)
        return answer

    async def _wait(self, request: AdmissionRequest) -> Dispatched | Refused:
        """Waits for the answer to a queued request. `poll` answers at its deadline at the latest."""
        waiter = self._waiters[request.key] = asyncio.get_running_loop().create_future()
        self._set_timer()
        try:
            return await waiter
        except BaseException:
            if self.admission.holds(request.key):
                self.leave(request, None)  # the wait was cancelled: the client disconnected
            raise
        finally:
            self._waiters.pop(request.key, None)

    def leave(self, request: AdmissionRequest, used: RequestUsage | None) -> None:
        now_s = time.monotonic()
        self.admission.end(request.key, used, now_s)
        if used is not None:
            self._metrics.spent(request.tenant, request.prompt_tokens + used.output_tokens)
        if self.admission.num_waiting:
            self._poll(now_s)

    def start(self, request: AdmissionRequest) -> None:
        """Records the request's first token."""
        self.admission.start(request.key)
        if self.admission.num_waiting:
            self._poll(time.monotonic())

    def grow(self, request: AdmissionRequest, output_tokens: int) -> None:
        """Charges more KV to an open-ended request that has emitted this many tokens in total."""
        self.admission.grow(request.key, output_tokens)

    # Quotas shared with the other routers.

    def tenant_uses(self) -> Mapping[str, TenantUse]:
        return self.admission.accounts.uses()

    def on_peer_uses(self, peer: str, epoch: Epoch, uses: Mapping[str, TenantUse]) -> None:
        self.admission.accounts.on_peer_uses(peer, epoch, uses, time.monotonic())
        self._on_load()  # quota that a tenant freed at the peer may admit its requests here

    def on_peer_away(self, peer: str) -> None:
        self.admission.accounts.on_peer_away(peer)
        self._on_load()

    def saturation(self) -> float:
        """Returns the current saturation, measured now if no request arrived recently."""
        self._refresh(time.monotonic())
        return self.admission.saturation

    def close(self) -> None:
        for timer in (self._expiry_timer, self._report_timer):
            if timer is not None:
                timer.cancel()

    def _poll(self, now_s: float) -> None:
        self._refresh(now_s)
        for answer in self.admission.poll(now_s):
            waiter = self._waiters.pop(answer.key)
            if not waiter.done():  # else `_wait` was cancelled and calls `leave` when it resumes
                waiter.set_result(answer)
        self._set_timer()

    def _set_timer(self) -> None:
        at_s = self.admission.next_poll_s()
        if at_s is None or (self._expiry_timer is not None and self._expiry_s <= at_s):
            return  # a timer that fires too early is harmless: it expires nothing and is set again
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._expiry_s = at_s
        loop = asyncio.get_running_loop()
        self._expiry_timer = loop.call_later(max(0.0, at_s - time.monotonic()), self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_timer = None
        self._poll(time.monotonic())

    def _on_load(self) -> None:
        """Schedules a poll after a report, arrival or loss of a worker or another router.

        One poll serves all reports that arrive within the delay. It is needed only while requests wait or the router is
        overloaded.
        """
        if self._report_timer is None and (
            self.admission.num_waiting or self.admission.level is not OverloadLevel.NORMAL
        ):
            self._report_timer = asyncio.get_running_loop().call_later(_SUMMARY_INTERVAL_S, self._poll_after_reports)

    def _poll_after_reports(self) -> None:
        self._report_timer = None
        self._poll(time.monotonic())

    def _refresh(self, now_s: float) -> None:
        if now_s - self._summarized_s >= _SUMMARY_INTERVAL_S:
            self._summarized_s = now_s
            self.admission.on_fleet(self._state(now_s), now_s)

    def _state(self, now_s: float) -> FleetState | None:
        group = self._fleet.every_group()
        if group is None:
            return None
        own, own_bulk = self.admission.outstanding.num_sequences, self.admission.num_bulk_sequences
        peer_sequences = self._peer_sequences.observe(num_reported(group.decode), own, now_s)
        peer_bulk = self._peer_bulk.observe(num_bulk_reported(group.decode), own_bulk, now_s)
        return summarize_fleet(group.decode, group.prefill, peer_sequences, min(peer_bulk, peer_sequences))


class AdmissionSlot:
    """Holds one request's admission. `enter` may wait for the request's turn; `leave` lets the next request in."""

    def __init__(self, gate: AdmissionGate, request: PreparedRequest, admission_request: AdmissionRequest) -> None:
        self._gate = gate
        self._admission_request = admission_request
        self._started = False
        self._num_emitted = sum(len(before.token_ids) for before in request.emitted.values())
        self._grows_at = min(request.sampling.max_tokens, OPEN_ENDED_TOKENS) * request.sampling.n
        self.request = request  # `enter` may lower its max_tokens and min_tokens
        self.granted_tokens: int | None = None  # the lowered max_tokens; None if granted as requested
        self.admitted_s = 0.0  # monotonic; 0 before admission
        self._left = False

    async def __aenter__(self) -> AdmissionSlot:
        await self.enter()
        return self

    async def enter(self) -> None:
        """Waits for the request's turn; `leave` must follow. Raises Overloaded, DeadlineExceeded or InvalidInput."""
        answer = await self._gate.enter(self._admission_request)
        self.admitted_s = time.monotonic()
        # A request that another router started keeps the length that it was granted there.
        if answer.max_tokens < self._admission_request.max_tokens and not self.request.emitted:
            self.granted_tokens = answer.max_tokens
            sampling = self.request.sampling
            shorter = replace(
                sampling, max_tokens=answer.max_tokens, min_tokens=min(sampling.min_tokens, answer.max_tokens)
            )
            self.request = replace(self.request, sampling=shorter)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self, used: RequestUsage = NOTHING_USED) -> None:
        """Releases what the request held and counts its usage at the workers. Idempotent."""
        if not self._left:
            self._left = True
            self._gate.leave(self._admission_request, used)

    def emit(self, num_tokens: int) -> None:
        """Records output tokens and charges more KV to an open-ended request as it grows."""
        self._num_emitted += num_tokens
        if self._admission_request.open_ended and not self._left and self._num_emitted >= self._grows_at:
            self._grows_at += OPEN_ENDED_TOKENS
            self._gate.grow(self._admission_request, self._num_emitted)

    def start(self) -> None:
        """Records the request's first token. Idempotent."""
        if not (self._started or self._left):
            self._started = True
            self._gate.start(self._admission_request)
