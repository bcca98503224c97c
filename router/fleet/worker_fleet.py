"""Holds the workers that a router may use, as the Admin service publishes them or the configuration lists them.

Owns a follower for each worker and wakes the requests that wait for workers. While the Admin service is unreachable the
last known members stay, so that the data plane outlives the control plane.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import grpc
import grpc.aio

from penstock import wire
from penstock.config import IndexConfig
from penstock.rpc.server import log_level
from penstock.rpc.trust import Trust
from penstock.types import Member, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc
from router.fleet.adapters.registry import AdapterRegistry
from router.fleet.backoff import Backoff
from router.fleet.fleet_worker import FleetWorker, WorkerRecords
from router.fleet.health import FleetHealth
from router.fleet.peer_routers import PeerRouters
from router.fleet.tickets import IssuedTickets
from router.fleet.worker_follower import WorkerFollower
from router.fleet.worker_groups import WorkerGroup, largest_group, merge_groups
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import NO_WORK, InflightLedger, InflightWork, PeerInflight
from router.routing.costs.link_costs import LinkBook
from router.routing.costs.pull_costs import PullBook
from router.routing.index.prefix_index import DEFAULT_CONFIG, PrefixIndex
from router.routing.index.stored_pages import StoredPages

log = logging.getLogger(__name__)

FoundT = TypeVar("FoundT")
_PAUSE_PATIENCE_S = 30.0  # how long requests wait at least while workers pause


class WorkerFleet:
    """Owns the followers and what they record: prefix index, in-flight ledger, costs, health and tickets.

    Also owns the other routers' reports of their work in flight.
    """

    def __init__(self, trust: Trust | None = None, index: IndexConfig = DEFAULT_CONFIG) -> None:
        """`trust` opens channels to workers, other routers and the Admin service."""
        trust = trust or Trust()
        self.dial = trust.channel
        self.index = PrefixIndex(index, lambda: self._tidying.wake())
        self._tidying = IndexTidyRunner(self.index, every_s=index.approximate_ttl_s / 8)
        self._tidy_task: asyncio.Task[None] | None = None
        self.ledger = InflightLedger()
        self.peer_load = PeerInflight()
        self.peers = PeerRouters(self.ledger, self.peer_load, trust)
        self.tickets = IssuedTickets(self.peers.epoch)
        self.adapters = AdapterRegistry()
        self.health = FleetHealth()
        self.costs = CostBook()
        self.links = LinkBook()
        self.pulls = PullBook()
        self.stored = StoredPages()
        self._records = WorkerRecords(
            index=self.index,
            ledger=self.ledger,
            health=self.health,
            costs=self.costs,
            links=self.links,
            pulls=self.pulls,
            tickets=self.tickets,
            stored=self.stored,
            store_turns=defaultdict(asyncio.Lock),
        )
        self._followers: dict[tuple[str, int], FleetWorker] = {}  # by address and epoch; epoch 0 if unknown
        self._retiring: dict[asyncio.Task[None], FleetWorker] = {}  # by the task that waits for its last request
        self._waiters: set[asyncio.Future[None]] = set()
        self._load_watchers: list[Callable[[], None]] = []
        self._groups: dict[tuple[str | None, str | None], WorkerGroup | None] = {}  # cached until the next change
        self.spares: Mapping[str, int] = {}  # number of spares by pool, as the controller reports
        self.is_paused = False  # True while workers pause for a replacement of their weights
        self.ends: Mapping[str, int] = {}  # number of workers that ended, by how, as the controller reports
        self._shares: Mapping[str, float] = {}  # of new requests, by cohort; empty: all go to the largest group

    def sent_to(self, worker_id: WorkerId, now_s: float) -> InflightWork:
        """Returns the work that this router and the others have sent and that the worker's load report lacks."""
        own, others = self.ledger.sent_to(worker_id), self.peer_load.sent_to(worker_id, now_s)
        return own + others if others is not NO_WORK else own

    def sent_to_all(self, worker_ids: Sequence[WorkerId], now_s: float) -> list[InflightWork]:
        """Returns `sent_to` of each worker."""
        return self.peer_load.added_to(self.ledger.sent_to_all(worker_ids), worker_ids, now_s)

    def distrust(self, worker_id: WorkerId) -> None:
        """Requests a snapshot of a worker's cache, because the index was found wrong about it."""
        for worker in self.followers:
            if worker.worker_id == worker_id:
                worker.request_snapshot()

    @property
    def followers(self) -> tuple[FleetWorker, ...]:
        return tuple(self._followers.values())

    @property
    def leaving(self) -> tuple[FleetWorker, ...]:
        """Returns the retired workers that still serve requests of this router."""
        return tuple(self._retiring.values())

    def find(self, worker_id: str, epoch: int) -> FleetWorker | None:
        return next(
            (worker for worker in self.followers if (worker.worker_id, worker.epoch) == (worker_id, epoch)), None
        )

    def group(self, model_revision: str | None = None, cohort: str | None = None) -> WorkerGroup | None:
        """Returns the largest group that serves now, or None.

        `model_revision` restricts it for a request that began with that revision, `cohort` for a request in that
        cohort's share.
        """
        key = (model_revision, cohort)
        if key not in self._groups:
            self._groups[key] = largest_group(self._followers.values(), *key)
        return self._groups[key]

    def group_for(self, model_revision: str, cohort: str | None) -> WorkerGroup | None:
        """Returns the group for a request that has begun: its cohort's, or else any group of its revision."""
        return self.group(model_revision, cohort) or self.group(model_revision)

    def choose_group(self, fraction: float) -> WorkerGroup | None:
        """Returns the group for a new request. `fraction`, in [0, 1), picks the cohort by its share of requests."""
        groups = {cohort: group for cohort in sorted(self._shares) if (group := self.group(cohort=cohort)) is not None}
        total = sum(self._shares[cohort] for cohort in groups)
        for cohort, group in groups.items():
            fraction -= self._shares[cohort] / total if total else 1.0
            if fraction < 0:
                return group
        return self.group()

    def every_group(self) -> WorkerGroup | None:
        """Returns all workers that serve new requests, merged into one group that is only good for sums."""
        cohorts = [cohort for cohort, share in self._shares.items() if share]
        groups = [group for cohort in cohorts if (group := self.group(cohort=cohort)) is not None]
        if len(groups) < 2:
            return groups[0] if groups else self.group()
        return merge_groups(groups)

    async def wait_for(self, find: Callable[[], FoundT | None], timeout_s: float | None) -> FoundT | None:
        """Returns what `find` finds, now or after a change of the workers; None after `timeout_s`."""
        if (found := find()) is not None:
            return found  # the usual case needs no timer
        try:
            async with asyncio.timeout(timeout_s):
                while (found := find()) is None:
                    await self.wait_change()
        except TimeoutError:
            return find()
        return found

    def patience_s(self, usual_s: float) -> float:
        """Returns how long a request waits for a worker: longer while workers pause, since they will come back."""
        return max(usual_s, _PAUSE_PATIENCE_S) if self.is_paused else usual_s

    async def wait_change(self) -> None:
        """Returns once a worker joins, leaves, or starts or stops taking work."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def set_members(self, members: Sequence[Member], shares: Mapping[str, float] = MappingProxyType({})) -> None:
        """Replaces the membership: follows new members and retires missing ones.

        `shares` are the shares of new requests by cohort; empty unless there are two cohorts.
        """
        self._shares = dict(shares)
        wanted = {(member.address, int(member.epoch)): member for member in members}
        for key in [key for key in self._followers if key not in wanted]:
            follower = self._followers.pop(key)
            task = follower.retire()
            self._retiring[task] = follower
            task.add_done_callback(self._retiring.pop)
        for key, member in wanted.items():
            if key not in self._followers:
                self._follow(member.address, member)
            elif self._followers[key].cohort != member.cohort:
                self._followers[key].cohort = member.cohort
                self._on_change()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Follows the workers at fixed addresses. Each worker's identity is read from its own description."""
        for address in addresses:
            self._follow(address, None)

    def add(self, make: Callable[[WorkerRecords, Callable[[], None], Callable[[], None]], FleetWorker]) -> None:
        """Follows a worker of another kind until `stop`. `make` gets the records, `on_change` and `on_load`."""
        self._start(make(self._records, self._on_change, self._on_load), 0)

    def _follow(self, address: str, member: Member | None) -> None:
        follower = WorkerFollower(
            address, member, self._records, self.dial, on_change=self._on_change, on_load=self._on_load
        )
        self._start(follower, int(member.epoch) if member else 0)

    def _start(self, follower: FleetWorker, epoch: int) -> None:
        if self._tidy_task is None:
            self._tidy_task = asyncio.create_task(self._tidying.run(), name="index tidying")
        self._followers[follower.address, epoch] = follower
        follower.start()

    def watch_loads(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after each load report and each change of the workers. It must return quickly."""
        self._load_watchers.append(callback)

    def _on_load(self) -> None:
        for callback in self._load_watchers:
            callback()

    def _on_change(self) -> None:
        self._groups.clear()
        self._on_load()
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def stop(self) -> None:
        if self._tidy_task is not None:
            self._tidy_task.cancel()
        for task in self._retiring:
            task.cancel()
        await self.peers.stop()
        self.tickets.close()
        await asyncio.gather(*(follower.stop() for follower in self._followers.values()))
        self._followers.clear()
        self._groups.clear()


async def follow_admin(address: str, fleet: WorkerFleet) -> None:
    """Updates the fleet from the memberships that the Admin service publishes, until cancelled."""
    backoff = Backoff(random.Random())
    while True:
        async with fleet.dial(address) as channel:
            try:
                request = admin_pb2.WatchMembershipRequest(router=fleet.peers.address)
                watch = admin_pb2_grpc.AdminStub(channel).WatchMembership(request)
                async for membership in watch:
                    backoff.reset()
                    log.info("membership version %d: %d members", membership.version, len(membership.members))
                    fleet.peers.set_addresses(membership.routers)
                    fleet.spares, fleet.ends = dict(membership.spares), dict(membership.ends)
                    fleet.is_paused = bool(membership.paused)
                    members = [wire.member_from_wire(member) for member in membership.members]
                    fleet.set_members(members, membership.shares)
                log.info("the admin service at %s ended its stream", address)
            except grpc.RpcError as error:
                log.log(log_level(error), "the admin service at %s is unreachable: %s", address, error.details())  # type: ignore[attr-defined]
        await asyncio.sleep(backoff.next_s())


class IndexTidyRunner:
    """Cleans up the prefix index, one bounded piece at a time between the event loop's other work.

    It runs when a worker has left, and every `every_s` to expire the pages assumed at workers with silent caches.
    """

    def __init__(self, index: PrefixIndex, every_s: float) -> None:
        self._index = index
        self._every_s = every_s
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            more = self._index.tidy(time.monotonic())
            await (asyncio.sleep(0) if more else self._wait())

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._every_s):
                await self._woken.wait()
        except TimeoutError:
            return  # assumed pages may have expired
        self._woken.clear()
