"""The door of a router in virtual time: the real admission, polled as `router.gate` polls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.admission_config import AdmissionConfig
from penstock.errors import PenstockError
from penstock.types import Role
from router.admission import Admission
from router.capacity import FleetState
from router.verdicts import Ask, Dispatched, Queued, Refused, Used
from router.views import Limits
from simulator.events import Timer
from simulator.follower_model import FollowerModel
from simulator.network import Node

_FRESH_S = 0.02


class GateModel:
    """Owns who waits. `go` and `refuse` are told of each request once, at the door or later."""

    def __init__(
        self,
        node: Node,
        config: AdmissionConfig,
        state: Callable[[], FleetState | None],
        go: Callable[[int, int], None],
        refuse: Callable[[int, PenstockError], None],
    ) -> None:
        self.most_waiting = 0
        self.admission = Admission(config, node.sim.rng("admission"))
        self._node = node
        self._state = state
        self._go = go
        self._refuse = refuse
        self._timer: Timer | None = None
        self._polling = False
        self._fresh_s = -1.0

    def enter(self, ask: Ask) -> None:
        self._refresh()
        answer = self.admission.offer(ask, self._node.sim.now_s)
        if not isinstance(answer, Queued):
            self._tell(answer)
        self.most_waiting = max(self.most_waiting, self.admission.num_waiting)
        self._set_timer()

    def start(self, key: int) -> None:
        """Its first token has come."""
        self.admission.start(key)
        self.poll_soon()

    def leave(self, key: int, used: Used) -> None:
        """Wherever it is; without effect on one that was refused."""
        if self.admission.holds(key):
            self.admission.end(key, used, self._node.sim.now_s)
            self.poll_soon()

    def poll_soon(self) -> None:
        """Something has changed. Not at once: whoever goes out calls workers that may be calling here."""
        if not self._polling and self.admission.num_waiting:
            self._polling = True
            self._node.after(0.0, self._poll)

    def _poll(self) -> None:
        self._polling = False
        self._refresh()
        for answer in self.admission.poll(self._node.sim.now_s):
            self._tell(answer)
        self._set_timer()

    def _tell(self, answer: Dispatched | Refused) -> None:
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


def fleet_state(followers: Sequence[FollowerModel], limits: dict[Role, Limits]) -> FleetState | None:
    """As `router.fleet_state` sums them up."""
    ready = [one for one in followers if one.takes_work]
    decode = [one for one in ready if one.role is Role.DECODE]
    if not decode:
        return None
    prefill = [one for one in ready if one.role is Role.PREFILL]
    computing = prefill or decode
    rates = [one.load.prefill_tokens_per_s for one in computing]
    steps = [one.load.step_s for one in decode if one.load.step_s]
    return FleetState(
        num_decode=len(decode),
        num_prefill=len(prefill),
        slots=limits[Role.DECODE].max_running * len(decode),
        num_waiting=sum(one.load.num_waiting for one in decode),
        kv_tokens=sum(one.load.total_pages * one.page_size for one in decode),
        free_kv_tokens=sum(one.load.free_pages * one.page_size for one in decode),
        queued_prefill_tokens=sum(one.load.queued_prefill_tokens for one in computing),
        prefill_tokens_per_s=sum(rates) if all(rates) else None,
        step_s=sum(steps) / len(steps) if steps else None,
    )
