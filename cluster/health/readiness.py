"""Decides whether the deployment can serve a request, and whether it ever will, by sending one through each router.

A deployment without its own routers is ready once its workers are, because it has no router to send a request through.

Owns which routers have served one, whether the deployment was ever ready, and why it never can be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.pools.pool import ROUTER, Incarnation, Pools
from penstock.errors import CheckpointError, ConfigError, InvalidInput, PenstockError, Unavailable

log = logging.getLogger(__name__)

MAX_START_FAILURES = 3
RETRY_PAUSE_S = 1.0  # after a first request that failed
_HOPELESS = (CheckpointError, ConfigError, InvalidInput)  # another try would end the same way

SendFirstRequest = Callable[[str], Awaitable[None]]  # to the router at this address; raises PenstockError


class Readiness:
    def __init__(
        self,
        pools: Pools,
        send_first_request: SendFirstRequest,
        timeout_s: float,
        *,
        was_ready: bool,
        has_routers: bool = True,
    ) -> None:
        """`timeout_s` bounds each first request. Without `has_routers`, no request is sent."""
        self.was_ready = was_ready
        self.failure: PenstockError | None = None  # the deployment can never become ready
        self._pools = pools
        self._send_first_request = send_first_request
        self._timeout_s = timeout_s
        self._has_routers = has_routers
        self._proven: set[Incarnation] = set()  # routers whose first request succeeded
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Returns whether a request would succeed now: a proven router answers and has a decode worker to send it to.

        Without routers of its own, the deployment is ready while a router elsewhere would find a decode worker."""
        if not self._has_routers:
            return self.was_ready and self._pools.can_decode
        router_proven = any(slot.incarnation in self._proven for slot in self._pools[ROUTER].ready())
        return router_proven and self._pools.can_decode

    def trust(self, router: Incarnation) -> None:
        """Counts a router as proven by an earlier controller, if the deployment was ready then."""
        if self.was_ready:
            self._proven.add(router)

    def check(self, on_result: Callable[[], None]) -> None:
        """Begins to send a real request through a new router, if it could succeed; `on_result` is called after it."""
        unproven = [slot for slot in self._pools[ROUTER].ready() if slot.incarnation not in self._proven]
        idle = self._task is None or self._task.done()
        can_answer = self._pools.can_decode
        if not self.was_ready:
            can_answer = can_answer and all(pool.is_complete for pool in self._pools)
            if can_answer and not self._has_routers:
                self.was_ready = True
                on_result()
                return
        if unproven and can_answer and idle and not self._is_closed:
            router = unproven[0]
            self._task = asyncio.create_task(self._prove(router.incarnation, router.address, on_result))

    async def _prove(self, router: Incarnation, address: str, on_result: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_first_request(address)
        except (PenstockError, TimeoutError) as error:
            reason = f"its first request failed: {error or 'no answer in time'}"
            log.warning("%s: %s", router.worker_id, reason)
            if not self.was_ready:
                self.failure = Unavailable(f"the deployment started, but {reason}")
            await asyncio.sleep(RETRY_PAUSE_S)
        else:
            self._proven.add(router)
            self.was_ready = True
        on_result()

    def on_error(self, error: PenstockError) -> None:
        """Notes the error that a process ended with."""
        if not self.was_ready and isinstance(error, _HOPELESS):
            self.failure = error

    def on_lost(self, incarnation: Incarnation) -> None:
        """Fails a deployment that was never ready if a process never comes up; later a process is retried forever."""
        slot = self._pools.slot_of(incarnation)
        if slot is not None and slot.failures_in_a_row >= MAX_START_FAILURES and not self.was_ready:
            failures = f"{slot.worker_id} failed {slot.failures_in_a_row} times to start"
            self.failure = self.failure or Unavailable(f"{failures}; the last time: {slot.detail}")

    def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
