"""The asynchronous shell of `router.admission`: a request passes at once, waits here, or is refused.

Owns the futures of those that wait, and the timer for the first of them whose time is up. Where there is room a request
goes through without a wait, a timer or another task.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from penstock.config import RouterConfig
from penstock.errors import Overloaded
from penstock.retry import RetryBudget
from router.accounts import Limits
from router.admission import Admission
from router.admission_metrics import AdmissionMetrics
from router.capacity import FleetState
from router.fleet_state import OthersOut, fleet_state, num_reported
from router.membership import Fleet
from router.overload import Level
from router.request import Request
from router.verdicts import Ask, Dispatched, Queued, Refused, Used

_FRESH_S = 0.02  # the workers' reports are summed up no more often
_RETRY_AFTER_S = 1.0


class Gate:
    """Every request of a router goes in and out here."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        metrics: AdmissionMetrics,
        rng: random.Random,
        limits_of: Callable[[str], Limits],
    ) -> None:
        self.admission = Admission(config.admission, rng, limits_of=limits_of)
        self.retries = RetryBudget(config.admission.retry_share, config.admission.retry_reserve)
        self._max_inside = config.max_inflight
        self._fleet = fleet
        self._metrics = metrics
        self._rng = rng
        self._others = OthersOut()
        self._waiters: dict[int, asyncio.Future[Dispatched | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._soon: asyncio.TimerHandle | None = None  # a poll, after reports
        self._fresh_s = 0.0
        self._last_key = 0
        fleet.watch_loads(self._on_load)

    def pass_through(self, request: Request) -> Passage:
        self._last_key += 1
        ask = Ask(
            key=self._last_key,
            lane=request.lane,
            tenant=request.tenant,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            arrived_s=request.accepted_s,
            deadline_s=request.deadline_s,
            num_sequences=request.sampling.n,
        )
        return Passage(self, request, ask)

    async def enter(self, ask: Ask) -> Dispatched:
        """Returns when it may go out. Raises Overloaded, DeadlineExceeded or InvalidInput where it may not."""
        now_s = time.monotonic()
        self._refresh(now_s)
        if self.admission.num_inside >= self._max_inside:
            self._metrics.refused(ask.lane, "max_inflight")
            hint_s = _RETRY_AFTER_S * self._rng.uniform(1.0, 1.5)
            raise Overloaded(f"this router has {self._max_inside} requests under way, its limit; try again", hint_s)
        answer = self.admission.offer(ask, now_s)
        if isinstance(answer, Queued):
            answer = await self._wait(ask)
        if isinstance(answer, Refused):
            self._metrics.refused(ask.lane, answer.reason)
            raise answer.error()
        self._metrics.passed(ask.lane, answer.waited_s)
        return answer

    async def _wait(self, ask: Ask) -> Dispatched | Refused:
        """Bounded by its deadline and its lane's longest wait, which `poll` sees to."""
        waiter = self._waiters[ask.key] = asyncio.get_running_loop().create_future()
        self._set_timer()
        try:
            return await waiter
        except BaseException:
            if self.admission.holds(ask.key):
                self.leave(ask, None)  # its caller has gone
            raise
        finally:
            self._waiters.pop(ask.key, None)

    def leave(self, ask: Ask, used: Used | None) -> None:
        now_s = time.monotonic()
        self.admission.end(ask.key, used, now_s)
        if used is not None:
            self._metrics.spent(ask.tenant, ask.prompt_tokens + used.output_tokens)
        if self.admission.num_waiting:
            self._poll(now_s)

    def start(self, ask: Ask) -> None:
        """Its first token has come."""
        self.admission.start(ask.key)
        if self.admission.num_waiting:
            self._poll(time.monotonic())

    def saturation(self) -> float:
        """Of this moment, also where no request has come for a while."""
        self._refresh(time.monotonic())
        return self.admission.saturation

    def close(self) -> None:
        for timer in (self._timer, self._soon):
            if timer is not None:
                timer.cancel()

    def _poll(self, now_s: float) -> None:
        self._refresh(now_s)
        for answer in self.admission.poll(now_s):
            waiter = self._waiters.pop(answer.key)
            if not waiter.done():  # else cancelled this very moment: it leaves when it wakes
                waiter.set_result(answer)
        self._set_timer()

    def _set_timer(self) -> None:
        at_s = self.admission.next_poll_s()
        if at_s is None or (self._timer is not None and self._timer_s <= at_s):
            return  # one that is early finds nothing, and is set anew
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._poll(time.monotonic())

    def _on_load(self) -> None:
        """A worker has reported, come or gone. Many do so at once, and only who waits wants to know."""
        if self._soon is None and (self.admission.num_waiting or self.admission.level is not Level.NORMAL):
            self._soon = asyncio.get_running_loop().call_later(_FRESH_S, self._poll_soon)

    def _poll_soon(self) -> None:
        self._soon = None
        self._poll(time.monotonic())

    def _refresh(self, now_s: float) -> None:
        if now_s - self._fresh_s >= _FRESH_S:
            self._fresh_s = now_s
            self.admission.on_fleet(self._state(now_s), now_s)

    def _state(self, now_s: float) -> FleetState | None:
        group = self._fleet.every_group()
        if group is None:
            return None
        others = self._others.observe(num_reported(group), self.admission.out.num_sequences, now_s)
        return fleet_state(group, others)


class Passage:
    """One request at the gate. Entering it may take a while, leaving it lets the next one in."""

    def __init__(self, gate: Gate, request: Request, ask: Ask) -> None:
        self._gate = gate
        self._ask = ask
        self._started = False
        self.request = request  # within the block: as it was granted
        self.granted_tokens: int | None = None  # max_tokens, where it gets fewer than it asked for
        self.used: Used | None = None  # once it has come to its end
        self.num_tokens: Callable[[], int] = lambda: 0  # of its output so far

    async def __aenter__(self) -> Passage:
        await self.enter()
        return self

    async def enter(self) -> None:
        """Waits for its turn; `leave` must follow. Raises Overloaded, DeadlineExceeded or InvalidInput."""
        answer = await self._gate.enter(self._ask)
        # One that was begun elsewhere was promised its length there.
        if answer.max_tokens < self._ask.max_tokens and not self.request.emitted:
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

    def leave(self) -> None:
        """Once."""
        self._gate.leave(self._ask, self.used or Used(self.num_tokens(), whole=False))

    def start(self) -> None:
        """Its first token has come. Twice is once."""
        if not self._started:
            self._started = True
            self._gate.start(self._ask)
