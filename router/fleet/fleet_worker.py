"""Defines a worker as the rest of the router sees it: our own (`WorkerFollower`) or an engine (`EngineFollower`)."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.types import Epoch, WorkerId, WorkerLoad
from penstock.v1 import worker_pb2
from router.fleet.health import FleetHealth
from router.fleet.tickets import IssuedTickets
from router.fleet.token_link import TokenLink
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger
from router.routing.costs.link_costs import LinkBook
from router.routing.costs.pull_costs import PullBook
from router.routing.index.prefix_index import PrefixIndex
from router.routing.index.stored_pages import StoredPages, StoreKey
from router.routing.policy.interface import WorkerLimits


@dataclass(frozen=True, slots=True)
class WorkerRecords:
    """The records that the fleet keeps of its workers. Each follower records what its own worker reports."""

    index: PrefixIndex
    ledger: InflightLedger
    health: FleetHealth
    costs: CostBook
    links: LinkBook
    pulls: PullBook
    tickets: IssuedTickets
    stored: StoredPages
    store_turns: defaultdict[StoreKey, asyncio.Lock]  # held while a worker reports what that store holds

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Drops everything about an incarnation of a worker that has left."""
        self.index.drop(worker_id)
        self.ledger.forget(worker_id)
        self.health.forget(epoch)
        self.costs.forget(worker_id)
        self.links.forget(worker_id)
        self.pulls.forget(worker_id)


class FleetWorker(ABC):
    """Owns what a worker reports about itself and the task that follows the worker until it is retired.

    A subclass implements how to follow its kind of worker.
    """

    def __init__(
        self,
        address: str,
        worker_id: WorkerId,
        cohort: str,
        records: WorkerRecords,
        *,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
    ) -> None:
        """`on_change` is called when `takes_work` may have changed; `on_load` is called after each load report."""
        self.address = address
        self.worker_id = worker_id  # empty while only the address is known
        self.cohort = cohort  # a new membership may change it
        self.description = worker_pb2.WorkerDescription()
        self.limits = WorkerLimits()
        self.load = WorkerLoad()
        self.is_mute = False  # it reports cache hits but sends no page events
        self._records = records
        self._on_change = on_change
        self._on_load = on_load
        self._has_reported = False  # a load report has arrived over the current connection
        self._retired = False
        self._task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> Epoch:
        return Epoch(self.description.epoch)

    @property
    def page_size(self) -> int:
        return self.description.page_size

    @property
    def store(self) -> StoreKey | None:
        """The shared store that the worker reads pages from, if any."""
        store = self.description.store
        return StoreKey(store.url, self.description.layout_digest, store.run_pages) if store.run_pages else None

    @property
    @abstractmethod
    def link(self) -> TokenLink | None:
        """Returns the link that carries requests and tokens; None for a prefill worker or while the role is unknown."""

    @property
    def takes_work(self) -> bool:
        """Returns whether the worker serves a request that is sent now."""
        return self._has_reported and not self._retired

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"follow {self.address}")

    def retire(self) -> asyncio.Task[None]:
        """Stops sending new requests; those in flight finish. Returns a task that ends after the last one."""
        self._retired = True
        self._forget()
        self._on_change()
        return asyncio.create_task(self._finish(), name=f"retire {self.address}")

    async def stop(self) -> None:
        """Stops at once; requests on the link are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @abstractmethod
    def request_snapshot(self) -> None:
        """Requests a snapshot of the pages that the worker holds, because the index is wrong about them."""

    @abstractmethod
    async def _run(self) -> None:
        """Follows the worker until it is retired, reconnecting whenever it is lost."""

    async def _finish(self) -> None:
        """Stops once no request or ticket is left."""
        if self.link is not None:
            await self.link.wait_idle()
            await self._records.tickets.wait_idle(self.epoch)
        await self.stop()

    def _take_load(self, load: WorkerLoad) -> None:
        self.load = load
        self._records.ledger.on_report(self.worker_id, time.monotonic())
        self._records.costs.on_load(self.worker_id, load, self.page_size)
        self._on_load()

    def _forget(self) -> None:
        """Drops everything about this incarnation of the worker."""
        self._records.forget(self.worker_id, self.epoch)
        self.is_mute = False
