"""Models a router's view of one worker in virtual time. Follows `router.fleet.worker_follower`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.kv.events import KvEventBatch
from penstock.types import Epoch, Role, WorkerId, WorkerLoad
from router.fleet.backoff import Backoff
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger
from router.routing.costs.link_costs import LinkBook
from router.routing.costs.pull_costs import PullBook
from router.routing.index.prefix_index import PrefixIndex
from router.routing.policy.interface import WorkerLimits
from simulator.workers.decode_model import DecodeModel
from simulator.workers.event_feed import Deliver, EventFeed, Report
from simulator.workers.prefill_model import PrefillModel
from simulator.world.network import Call, Network, Node

Worker = PrefillModel | DecodeModel


class WorkerDirectory(Protocol):
    """The workers by name, and their event streams."""

    def find(self, name: str) -> Worker | None: ...

    def watch(self, worker: Worker, call: Call, next_seq: int, deliver: Deliver) -> EventFeed: ...


@dataclass(frozen=True, slots=True)
class RouterState:
    """The state that the followers of a router update."""

    index: PrefixIndex
    ledger: InflightLedger
    costs: CostBook
    links: LinkBook
    pulls: PullBook

    def forget(self, worker_id: WorkerId) -> None:
        """Drops everything about a worker that restarted."""
        self.index.drop(worker_id)
        self.ledger.forget(worker_id)
        self.costs.forget(worker_id)
        self.links.forget(worker_id)
        self.pulls.forget(worker_id)


class FollowerModel:
    """Follows one worker and reconnects forever. A decode worker also has a link, the lease of the requests on it."""

    def __init__(
        self,
        name: str,
        role: Role,
        limits: WorkerLimits,
        node: Node,
        network: Network,
        workers: WorkerDirectory,
        known: RouterState,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
        on_link_lost: Callable[[FollowerModel], None],
        on_due: Callable[[FollowerModel], None],
    ) -> None:
        """`on_due` is called when the worker's feed waits to be read, at a time that may be earlier than before."""
        self.worker_id = WorkerId(name)
        self.role = role
        self.limits = limits
        self.epoch = Epoch(0)  # 0 before the first connection
        self.load = WorkerLoad()
        self.page_size = 0
        self.worker: Worker | None = None  # the incarnation at the other end of the link
        self.link: Call | None = None
        self.feed: EventFeed | None = None
        self._node = node
        self._network = network
        self._workers = workers
        self._known = known
        self._on_change = on_change
        self._on_load = on_load
        self._on_link_lost = on_link_lost
        self._on_due = on_due
        self.retired = False  # no longer a member; followed until the worker is gone
        self._connected = False
        self._watch_call: Call | None = None
        self._backoff = Backoff(network.sim.rng(f"backoff {name}"))

    @property
    def takes_work(self) -> bool:
        return self._connected and (self.role is Role.PREFILL or (self.link is not None and self.link.is_open))

    def connect(self) -> None:
        if self.retired:
            self._known.forget(self.worker_id)
            return
        worker = self._workers.find(self.worker_id)
        if worker is None:
            self._node.after(self._backoff.next_s(), self.connect)
            return
        if self.epoch not in (0, worker.node.epoch):
            self._known.forget(self.worker_id)
        self.epoch, self.worker, self.page_size = worker.node.epoch, worker, worker.page_size
        if isinstance(worker, DecodeModel):
            self.link = self._open_link(worker)
            if self.link is None:
                return
        self._watch()

    def _open_link(self, worker: DecodeModel) -> Call | None:
        link: Call | None = None
        link = self._network.call(self._node, worker.node, self._lose_link, lambda: worker.on_caller_lost(link))
        return link

    def _watch(self) -> None:
        """Streams events from the next one that the index needs, and again after a gap."""
        assert self.worker is not None
        worker = self.worker
        call = self._network.call(self._node, worker.node, self._lose_watch)
        self._watch_call = call
        if call is None:
            return
        next_seq = self._known.index.next_seq(self.worker_id)

        def deliver(batch: KvEventBatch, load: WorkerLoad) -> None:
            if call is self._watch_call:
                self._apply(batch, load)

        call.send(self._node, lambda: self._begin_feed(worker, call, next_seq, deliver))

    def _begin_feed(self, worker: Worker, call: Call, next_seq: int, deliver: Deliver) -> None:
        self.feed = feed = self._workers.watch(worker, call, next_seq, deliver)
        if feed.waits:
            feed.on_due = lambda feed: self._on_due(self)
            self._on_due(self)

    def read(self, now_s: float) -> None:
        """Takes the reports that have arrived and wait to be read."""
        assert self.feed is not None
        reports = self.feed.read(now_s)
        for report in reports:
            self._take(report)
        if reports:
            self._known.ledger.on_report(self.worker_id, reports[-1].arrival_s)

    def _take(self, report: Report) -> None:
        self._known.costs.on_steps(self.worker_id, *report.totals)
        if report.load is not None and report.batch is not None:
            self.load = report.load
            is_whole = self._known.index.apply(self.worker_id, report.batch)
            assert is_whole, "only faults lose events, and after a fault reports do not wait"

    def _apply(self, batch: KvEventBatch, load: WorkerLoad) -> None:
        if not self._known.index.apply(self.worker_id, batch):
            assert self._watch_call is not None
            self._watch_call.close()
            self._watch()
            return
        self._backoff.reset()
        self.load = load
        self._known.ledger.on_report(self.worker_id, self._network.sim.now_s)
        self._known.costs.on_load(self.worker_id, load, self.page_size)
        self._on_load()
        if not self._connected:
            self._connected = True
            self._on_change()

    def _lose_watch(self) -> None:
        self._connected = False
        self._on_change()
        if self.role is Role.PREFILL:
            self._node.after(self._backoff.next_s(), self.connect)
        elif self.link is not None and self.link.is_open:
            self._node.after(self._backoff.next_s(), self._watch_again)

    def _watch_again(self) -> None:
        if self.link is not None and self.link.is_open and (self._watch_call is None or not self._watch_call.is_open):
            self._watch()

    def _lose_link(self) -> None:
        """Handles the loss of the worker and of all requests on its link."""
        self.link, self._connected = None, False
        if self._watch_call is not None:
            self._watch_call.close()
        self._on_change()
        self._on_link_lost(self)
        self._node.after(self._backoff.next_s(), self.connect)
