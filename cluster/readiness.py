"""Whether the deployment can answer, and whether it ever will: a real request goes through every new router.

Owns which routers have proven themselves, whether the deployment was ever ready, and why it never can be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.pool import Incarnation
from cluster.pools import Pools
from cluster.supervised import ROUTER
from penstock.errors import CheckpointError, ConfigError, InvalidInput, PenstockError, Unavailable

log = logging.getLogger(__name__)

MAX_START_FAILURES = 3
CANARY_PAUSE_S = 1.0  # after one that failed
_HOPELESS = (CheckpointError, ConfigError, InvalidInput)  # another try would end alike

Canary = Callable[[str], Awaitable[None]]  # one real request to the router at this address; raises PenstockError


class Readiness:
    def __init__(
        self, pools: Pools, canary: Canary, timeout_s: float, publish: Callable[[], None], *, was_ready: bool
    ) -> None:
        """`timeout_s` is what a canary may take."""
        self.was_ready = was_ready
        self.failure: PenstockError | None = None  # the deployment can never become ready
        self._pools = pools
        self._canary = canary
        self._timeout_s = timeout_s
        self._publish = publish
        self._proven: set[Incarnation] = set()  # routers whose canary succeeded
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """A request would succeed now: the router answers and has a decode worker to send it to."""
        router_proven = any(slot.incarnation in self._proven for slot in self._pools[ROUTER].ready())
        return router_proven and self._pools.can_decode

    def trust(self, router: Incarnation) -> None:
        """An earlier controller has proven it, if it was ready at all."""
        if self.was_ready:
            self._proven.add(router)

    def check(self) -> None:
        """Sends a real request through every new router before the deployment calls itself ready."""
        unproven = [slot for slot in self._pools[ROUTER].ready() if slot.incarnation not in self._proven]
        idle = self._task is None or self._task.done()
        can_answer = self._pools.can_decode
        if not self.was_ready:
            can_answer = can_answer and all(pool.is_complete for pool in self._pools)
        if unproven and can_answer and idle and not self._is_closed:
            router = unproven[0]
            self._task = asyncio.create_task(self._run_canary(router.incarnation, router.address))

    async def _run_canary(self, router: Incarnation, address: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._canary(address)
        except (PenstockError, TimeoutError) as error:
            reason = f"its first request failed: {error or 'no answer in time'}"
            log.warning("%s: %s", router.worker_id, reason)
            if not self.was_ready:
                self.failure = Unavailable(f"the deployment started, but {reason}")
            await asyncio.sleep(CANARY_PAUSE_S)
        else:
            self._proven.add(router)
            self.was_ready = True
        self._publish()

    def on_error(self, error: PenstockError) -> None:
        """A process ended with it."""
        if not self.was_ready and isinstance(error, _HOPELESS):
            self.failure = error

    def on_lost(self, incarnation: Incarnation) -> None:
        """A process that never comes up ends a deployment that was never ready; later on it is tried for ever."""
        slot = self._pools.slot_of(incarnation)
        if slot is not None and slot.failures_in_a_row >= MAX_START_FAILURES and not self.was_ready:
            failures = f"{slot.worker_id} failed {slot.failures_in_a_row} times to start"
            self.failure = self.failure or Unavailable(f"{failures}; the last time: {slot.detail}")

    def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
