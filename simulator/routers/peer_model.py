"""Models the reports between the routers of one deployment in virtual time. Follows `router.fleet.peer_routers`.

Each router reports its requests in flight to every other one, which adds them to the load of the workers. A report
holds the whole state, so a lost or late one does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types import WorkerId
from router.fleet.backoff import Backoff
from router.routing.costs.inflight import NO_WORK, InflightLedger, InflightWork, PeerInflight
from simulator.world.network import Call, Network, Node
from simulator.world.virtual_time import Timer

_BEAT_S = 0.5  # longest time between two reports
_MIN_GAP_S = 0.01  # shortest time; changes within it are reported together


@dataclass(slots=True, eq=False)
class _Watch:
    """Another router that follows this one."""

    call: Call
    watcher: PeerModel
    pause: Timer | None = None  # timer until the next report may follow
    beat: Timer | None = None  # timer until a report is due without a change
    changed: bool = False


class PeerModel:
    """A router's end of the exchange: it reports to those that follow it, and follows others by name forever."""

    def __init__(
        self, node: Node, network: Network, ledger: InflightLedger, find: Callable[[str], PeerModel | None]
    ) -> None:
        """`find` returns the running router of a name."""
        self._node = node
        self._network = network
        self._ledger = ledger
        self._find = find
        self._known = PeerInflight()
        self._number = 0
        self._watches: list[_Watch] = []
        self._backoffs: dict[str, Backoff] = {}
        ledger.watch(self._note_change)

    def sent_to(self, worker_id: WorkerId) -> InflightWork:
        """Returns the work that all routers have sent to a worker, as far as this router knows."""
        if not self._backoffs:  # no peers
            return self._ledger.sent_to(worker_id)
        own, others = self._ledger.sent_to(worker_id), self._known.sent_to(worker_id, self._node.sim.now_s)
        return own + others if others is not NO_WORK else own

    def sent_to_all(self, worker_ids: Sequence[WorkerId]) -> list[InflightWork]:
        """Returns `sent_to` of each worker."""
        own = self._ledger.sent_to_all(worker_ids)
        return self._known.added_to(own, worker_ids, self._node.sim.now_s) if self._backoffs else own

    def follow(self, name: str) -> None:
        """Follows the router of that name, whichever incarnation runs, and again after each loss."""
        if name not in self._backoffs:
            self._backoffs[name] = Backoff(self._network.sim.rng(f"peer {self._node.name} {name}"))
        peer = self._find(name)
        if peer is None:
            self._lose(name)
            return
        call = self._network.call(self._node, peer._node, lambda: self._lose(name))
        if call is not None:
            call.send(self._node, lambda: peer._serve(call, self))

    def _lose(self, name: str) -> None:
        self._known.drop(name)
        self._node.after(self._backoffs[name].next_s(), lambda: self.follow(name))

    def _take(self, peer: PeerModel, number: int, work: dict[WorkerId, InflightWork]) -> None:
        node = peer._node
        self._backoffs[node.name].reset()
        self._known.apply(node.name, node.epoch, number, work, self._node.sim.now_s)

    # Reports to those that follow this router.

    def _serve(self, call: Call, watcher: PeerModel) -> None:
        watch = _Watch(call, watcher)
        self._watches.append(watch)
        self._report(watch)

    def _note_change(self) -> None:
        for watch in self._watches:
            watch.changed = True
            if watch.pause is None:
                self._report(watch)

    def _report(self, watch: _Watch) -> None:
        if watch.beat is not None:
            watch.beat.cancel()
            watch.beat = None
        if not watch.call.is_open:
            self._watches = [other for other in self._watches if other is not watch]
            return
        self._number += 1
        number, work = self._number, dict(self._ledger.totals())
        watch.changed = False
        watch.call.send(self._node, lambda: watch.watcher._take(self, number, work))
        watch.pause = self._node.after(_MIN_GAP_S, lambda: self._end_pause(watch))

    def _end_pause(self, watch: _Watch) -> None:
        watch.pause = None
        if watch.changed:
            self._report(watch)
        else:
            watch.beat = self._node.after(_BEAT_S, lambda: self._report(watch))
