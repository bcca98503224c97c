"""Which workers there are: followed from the Admin service, or fixed by the configuration. Wakes whoever waits for one.

While the Admin service is away the last known members stay: the data plane outlives the control plane.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import grpc
import grpc.aio

from penstock import wire
from penstock.config import IndexConfig
from penstock.grpc_server import log_level
from penstock.trust import Trust
from penstock.types import Member, Role, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc
from router.backoff import Backoff
from router.cost_model import CostBook
from router.follower import Follower
from router.health import FleetHealth
from router.index_keeper import IndexKeeper
from router.inflight import NO_WORK, InflightLedger, Work
from router.peer_load import PeerLoad
from router.peers import Peers
from router.prefix_index import DEFAULT_CONFIG, PrefixIndex
from router.tickets import Tickets
from router.topology import LinkBook

log = logging.getLogger(__name__)

FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that take work now and between which KV can move, whatever their page sizes. `decode` is not empty."""

    model_revision: str
    token_bytes: float  # of KV
    context_length: int  # that each of them can hold
    decode: tuple[Follower, ...]
    prefill: tuple[Follower, ...]
    page_sizes: frozenset[int]  # among them
    cohort: str | None = None  # of its decode workers; None: any


class Fleet:
    """Owns the followers, and with them the prefix index, the in-flight ledger, costs and what went wrong; and what
    other routers have under way."""

    def __init__(self, trust: Trust | None = None, index: IndexConfig = DEFAULT_CONFIG) -> None:
        """`trust` opens channels to workers, other routers and the Admin service."""
        trust = trust or Trust()
        self.dial = trust.channel
        self.index = PrefixIndex(index, lambda: self._keeper.wake())
        self._keeper = IndexKeeper(self.index, every_s=index.approximate_ttl_s / 8)
        self._keeping: asyncio.Task[None] | None = None
        self.ledger = InflightLedger()
        self.peer_load = PeerLoad()
        self.peers = Peers(self.ledger, self.peer_load, trust)
        self.tickets = Tickets(self.peers.epoch)
        self.health = FleetHealth()
        self.costs = CostBook()
        self.links = LinkBook()
        self._followers: dict[tuple[str, int], Follower] = {}  # by address and epoch; 0 where it is not known
        self._retiring: set[asyncio.Task[None]] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._load_watchers: list[Callable[[], None]] = []
        self._groups: dict[tuple[str | None, str | None], Group | None] = {}  # found since the last change
        self.spares: Mapping[str, int] = {}  # warm processes by pool, as the controller says
        self._shares: Mapping[str, float] = {}  # of new requests, by cohort; none: all to the largest group

    def sent_to(self, worker_id: WorkerId, now_s: float) -> Work:
        """By this router and the others, beyond what the worker's load report shows."""
        own, others = self.ledger.sent_to(worker_id), self.peer_load.sent_to(worker_id, now_s)
        return own + others if others is not NO_WORK else own

    def distrust(self, worker_id: WorkerId) -> None:
        """What is known of the worker's cache is not so: it is asked for anew."""
        for one in self.followers:
            if one.worker_id == worker_id:
                one.ask_anew()

    @property
    def followers(self) -> tuple[Follower, ...]:
        return tuple(self._followers.values())

    def find(self, worker_id: str, epoch: int) -> Follower | None:
        return next((one for one in self.followers if (one.worker_id, one.epoch) == (worker_id, epoch)), None)

    def group(self, model_revision: str | None = None, cohort: str | None = None) -> Group | None:
        """The largest group that serves now, of one revision where a request has begun with it, of one cohort where a
        share of requests falls to it."""
        key = (model_revision, cohort)
        if key not in self._groups:
            self._groups[key] = self._find_group(*key)
        return self._groups[key]

    def group_for(self, model_revision: str, cohort: str | None) -> Group | None:
        """For a request that has begun: of its cohort, or of whoever serves its revision where those have gone."""
        return self.group(model_revision, cohort) or self.group(model_revision)

    def choose_group(self, draw: float) -> Group | None:
        """For a new request. While two cohorts serve, `draw` of [0, 1) falls to one of them by their shares."""
        groups = {one: group for one in sorted(self._shares) if (group := self.group(cohort=one)) is not None}
        whole = sum(self._shares[one] for one in groups)
        for cohort, group in groups.items():
            draw -= self._shares[cohort] / whole if whole else 1.0
            if draw < 0:
                return group
        return self.group()

    def every_group(self) -> Group | None:
        """All workers that serve new requests as if they were one group, for sums alone."""
        shared = [one for one, share in self._shares.items() if share]
        groups = [group for one in shared if (group := self.group(cohort=one)) is not None]
        if len(groups) < 2:
            return groups[0] if groups else self.group()
        return replace(
            groups[0],
            decode=tuple(one for group in groups for one in group.decode),
            prefill=tuple(dict.fromkeys(one for group in groups for one in group.prefill)),
            page_sizes=frozenset().union(*(group.page_sizes for group in groups)),
        )

    def _find_group(self, model_revision: str | None, cohort: str | None) -> Group | None:
        ready = [one for one in self._followers.values() if one.takes_work]
        decode = [
            one
            for one in ready
            if one.description.role == Role.DECODE
            and model_revision in (None, one.description.model_revision)
            and cohort in (None, one.cohort)
        ]
        if not decode:
            return None
        counts = Counter(one.description.kv_digest for one in decode)
        digest = max(counts, key=lambda key: (counts[key], key))
        decode = [one for one in decode if one.description.kv_digest == digest]
        first = decode[0].description
        prefill = [one for one in ready if one.description.role == Role.PREFILL and one.description.kv_digest == digest]
        # Where its own have gone first, those of the other cohort that pages can move from will do.
        prefill = [one for one in prefill if cohort in (None, one.cohort)] or prefill
        return Group(
            model_revision=first.model_revision,
            token_bytes=first.page_bytes / first.page_size,
            context_length=min(one.description.context_length for one in decode),
            decode=tuple(decode),
            prefill=tuple(prefill),
            page_sizes=frozenset(one.description.page_size for one in (*decode, *prefill)),
            cohort=cohort,
        )

    async def wait_for(self, find: Callable[[], FoundT | None], timeout_s: float | None) -> FoundT | None:
        """What `find` finds now or after some change; None when time is up."""
        if (found := find()) is not None:
            return found  # without a timer, as nearly always
        try:
            async with asyncio.timeout(timeout_s):
                while (found := find()) is None:
                    await self.wait_change()
        except TimeoutError:
            return find()
        return found

    async def wait_change(self) -> None:
        """Until a worker comes, goes, begins or ceases to take work."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def set_members(self, members: Sequence[Member], shares: Mapping[str, float] = MappingProxyType({})) -> None:
        """Replaces the membership: new ones are followed, those left out get no new work. `shares` of new requests are
        by cohort, while there are two."""
        self._shares = dict(shares)
        wanted = {(member.address, int(member.epoch)): member for member in members}
        for key in [key for key in self._followers if key not in wanted]:
            task = self._followers.pop(key).retire()
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        for key, member in wanted.items():
            if key not in self._followers:
                self._follow(member.address, member)
            elif self._followers[key].cohort != member.cohort:
                self._followers[key].cohort = member.cohort
                self._on_change()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """A membership that never changes; who is at each address is asked there."""
        for address in addresses:
            self._follow(address, None)

    def _follow(self, address: str, member: Member | None) -> None:
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keeper.run(), name="index keeper")
        follower = Follower(
            address,
            member,
            self.index,
            self.ledger,
            self.health,
            self.costs,
            self.links,
            self.tickets,
            self._on_change,
            self.dial,
            self._on_load,
        )
        self._followers[address, int(member.epoch) if member else 0] = follower
        follower.start()

    def watch_loads(self, callback: Callable[[], None]) -> None:
        """Called after each report of a worker, and when one comes or goes. Must be quick."""
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
        if self._keeping is not None:
            self._keeping.cancel()
        for task in self._retiring:
            task.cancel()
        await self.peers.stop()
        self.tickets.close()
        await asyncio.gather(*(one.stop() for one in self._followers.values()))
        self._followers.clear()
        self._groups.clear()


async def follow_admin(address: str, fleet: Fleet) -> None:
    """Keeps the fleet as the Admin service says, until cancelled."""
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
                    fleet.spares = dict(membership.spares)
                    fleet.set_members([wire.member_from_wire(one) for one in membership.members], membership.shares)
                log.info("the admin service at %s ended its stream", address)
            except grpc.RpcError as error:
                log.log(log_level(error), "the admin service at %s is away: %s", address, error.details())  # type: ignore[attr-defined]
        await asyncio.sleep(backoff.next_s())
