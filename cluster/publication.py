"""What the controller tells those who follow it: the membership, and that something has changed.

Owns the published members, who watches them, the shares of requests and both versions. One event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from cluster.pools import Pools
from penstock import wire
from penstock.types import Member, WorkerId
from penstock.v1 import admin_pb2


class Publication:
    def __init__(
        self,
        pools: Pools,
        first_version: int,
        cohort_of: Callable[[WorkerId], str],
        on_change: Callable[[], None],
        count_spares: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`cohort_of` tells a worker's place among the shares; `on_change` is called once a change is published.
        `count_spares` tells each pool's warm processes."""
        self.members: tuple[Member, ...] = ()
        self.version = first_version
        self.stopped = False
        self._pools = pools
        self._cohort_of = cohort_of
        self._on_change = on_change
        self._membership_version = first_version + 1
        self._routers: Counter[str] = Counter()  # watches of each router's peer address
        self._shares: Mapping[str, float] = {}  # of new requests, by cohort, while two serve
        self._count_spares = count_spares
        self._spares: Mapping[str, int] = {}
        self._changed = asyncio.Event()

    def adopt_members(self) -> None:
        """Those that were members before there was a controller here: for them nothing changes."""
        self.members = self._current_members()

    def _current_members(self) -> tuple[Member, ...]:
        return tuple(replace(one, cohort=self._cohort_of(one.worker_id)) for one in self._pools.members())

    def publish(self) -> None:
        """Counts the change and wakes everyone who follows."""
        members, spares = self._current_members(), dict(self._count_spares())
        if members != self.members or spares != self._spares:
            self.members, self._spares = members, spares
            self._membership_version += 1
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def stop(self) -> None:
        """Lets everyone who follows end."""
        self.stopped = True
        self.publish()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change."""
        return self._changed

    async def next_change(self) -> None:
        await self._changed.wait()

    async def wait(self, version: int, timeout_s: float) -> None:
        """Until there is something newer than `version`, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.version <= version and not self.stopped:
                    await self._changed.wait()
        except TimeoutError:
            pass  # a long poll that saw no change answers with what there is

    async def wait_stopped(self) -> None:
        while not self.stopped:
            await self._changed.wait()

    def routers(self) -> list[str]:
        return sorted(+self._routers)

    @property
    def shares(self) -> Mapping[str, float]:
        return self._shares

    def adopt_shares(self, shares: Mapping[str, float]) -> None:
        """Those that routers had before there was a controller here."""
        self._shares = dict(shares)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        if shares != self._shares:
            self._shares = dict(shares)
            self._membership_version += 1
            self.publish()

    async def watch(self, router: str = "") -> AsyncIterator[admin_pb2.Membership]:
        """The whole membership now and after each change, until the controller stops.

        A watching router's peer address is part of it for as long as it watches.
        """
        sent = 0
        self._note_router(router, 1)
        try:
            while not self.stopped:
                changed = self._changed
                if sent != self._membership_version:
                    sent = self._membership_version
                    members = [wire.member_to_wire(one) for one in self.members]
                    yield admin_pb2.Membership(
                        version=sent,
                        members=members,
                        routers=self.routers(),
                        shares=self._shares,
                        spares=self._spares,
                    )
                await changed.wait()
        finally:
            self._note_router(router, -1)

    def _note_router(self, router: str, change: int) -> None:
        if router:
            self._routers[router] += change
            self._membership_version += 1
            self.publish()
