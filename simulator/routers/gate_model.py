"""Models a router's gate in virtual time: the real admission, polled as `router.admission.gate` polls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config.admission import AdmissionConfig
from penstock.errors import PenstockError
from penstock.types import Role
from router.admission.admission_policy import AdmissionPolicy
from router.admission.capacity import FleetState
from router.admission.fleet_summary import summarize_fleet
from router.admission.interface import AdmissionRequest, Dispatched, Queued, Refused, RequestUsage
from simulator.routers.follower_model import FollowerModel
from simulator.world.network import Node
from simulator.world.virtual_time import Timer

_FRESH_S = 0.02


class GateModel:
    """Owns the waiting requests. Calls `go` or `refuse` once for each request, at once or later."""

    def __init__(
        self,
        node: Node,
        config: AdmissionConfig,
        state: Callable[[], FleetState | None],
        go: Callable[[int, int], None],
        refuse: Callable[[int, PenstockError], None],
    ) -> None:
        self.most_waiting = 0
        self.admission = AdmissionPolicy(config, node.sim.rng("admission"))
        self._node = node
        self._state = state
        self._go = go
        self._refuse = refuse
        self._timer: Timer | None = None
        self._polling = False
        self._fresh_s = -1.0

    def enter(self, request: AdmissionRequest) -> None:
        """Dispatches, queues or refuses a request."""
        self._refresh()
        answer = self.admission.offer(request, self._node.sim.now_s)
        if not isinstance(answer, Queued):
            self._apply(answer)
        self.most_waiting = max(self.most_waiting, self.admission.num_waiting)
        self._set_timer()

    def start(self, key: int) -> None:
        """Notes a request's first token."""
        self.admission.start(key)
        self.poll_soon()

    def leave(self, key: int, used: RequestUsage) -> None:
        """Removes a request in any state; does nothing for a refused one."""
        if self.admission.holds(key):
            self.admission.end(key, used, self._node.sim.now_s)
            self.poll_soon()

    def poll_soon(self) -> None:
        """Polls after the current callback, because dispatching calls workers, which may be the caller."""
        if not self._polling and self.admission.num_waiting:
            self._polling = True
            self._node.after(0.0, self._poll)

    def _poll(self) -> None:
        self._polling = False
        self._refresh()
        for answer in self.admission.poll(self._node.sim.now_s):
            self._apply(answer)
        self._set_timer()

    def _apply(self, answer: Dispatched | Refused) -> None:
        if isinstance(answer, Dispatched):
            self._go(answer.key, answer.max_tokens)
        else:
            self._refuse(answer.key, answer.error())

    def _refresh(self) -> None:
        now_s = self._node.sim.now_s
        if now_s - self._fresh_s >= _FRESH_S:
            self._fresh_s = now_s
            self.admission.on_fleet(self._state(), now_s)

    def _set_timer(self) -> None:
        at_s = self.admission.next_poll_s()
        if at_s is None or (self._timer is not None and self._timer.callback and self._timer.time_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._node.after(max(0.0, at_s - self._node.sim.now_s), self._poll)


def fleet_state(followers: Sequence[FollowerModel]) -> FleetState | None:
    """Summarizes the workers that take requests; None if none decodes."""
    ready = [follower for follower in followers if follower.takes_work]
    decode = [follower for follower in ready if follower.role is Role.DECODE]
    prefill = [follower for follower in ready if follower.role is Role.PREFILL]
    return summarize_fleet(decode, prefill) if decode else None
