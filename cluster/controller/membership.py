"""Publishes the membership to routers, and wakes everything that waits for a change of the deployment.

Owns the published members, the routers that watch them and both version counters. Runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from cluster.lifecycle.upgrade.served_models import ServedModels
from cluster.pools.pool import Pools
from penstock import wire
from penstock.types import Member, WorkerId
from penstock.v1 import admin_pb2


class MembershipPublisher:
    def __init__(self, pools: Pools, served: ServedModels, first_version: int, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each published change."""
        self.members: tuple[Member, ...] = ()
        self.version = first_version
        self.stopped = False
        self._pools = pools
        self._served = served
        self._on_change = on_change
        self._membership_version = first_version + 1
        self._routers: Counter[str] = Counter()  # watches of each router's peer address
        self._shares: Mapping[str, float] = {}  # of new requests, by cohort, while two models serve
        self._paused: list[WorkerId] = []
        self._spares: Mapping[str, int] = {}  # warm spares by pool
        self._ends: Mapping[str, int] = {}  # numbers of workers, by the way they ended
        self._changed = asyncio.Event()

    def restore(self) -> None:
        """Marks the membership as published by an earlier controller, so that nothing changes for routers."""
        self.members = self._current_members()
        self._shares = dict(self._served.shares)

    def _current_members(self) -> tuple[Member, ...]:
        cohort_of = self._served.cohort_of
        return tuple(replace(member, cohort=cohort_of(member.worker_id)) for member in self._pools.members())

    def publish(self) -> None:
        """Counts the change and wakes everything that follows."""
        current = self._current_members(), dict(self._served.shares), self._pools.paused()
        if current != (self.members, self._shares, self._paused):
            self.members, self._shares, self._paused = current
            self._membership_version += 1
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def publish_spares(self, num_warm: Mapping[str, int]) -> None:
        """Publishes the number of warm spares by pool, for the routers' metrics."""
        if num_warm != self._spares:
            self._spares = dict(num_warm)
            self._membership_version += 1
        self.publish()

    def note_ends(self, ends: Mapping[str, int]) -> None:
        """Sets how many workers have ended in each way, for the routers' metrics. The counts go out with the change
        that is being published.
        """
        if ends != self._ends:
            self._ends = dict(ends)
            self._membership_version += 1

    def stop(self) -> None:
        """Ends every watch and every wait."""
        self.stopped = True
        self.publish()

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next change sets."""
        return self._changed

    async def next_change(self) -> None:
        await self._changed.wait()

    async def wait(self, version: int, timeout_s: float) -> None:
        """Returns once there is something newer than `version`, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.version <= version and not self.stopped:
                    await self._changed.wait()
        except TimeoutError:
            pass  # a long poll that saw no change answers with the present state

    async def wait_stopped(self) -> None:
        while not self.stopped:
            await self._changed.wait()

    def routers(self) -> list[str]:
        """Returns the peer addresses of the routers that watch."""
        return sorted(+self._routers)

    async def watch(self, router: str = "") -> AsyncIterator[admin_pb2.Membership]:
        """Yields the whole membership now and after each change, until the controller stops.

        `router` is the watching router's peer address, which is part of the membership while it watches.
        """
        sent = 0
        self._note_router(router, 1)
        try:
            while not self.stopped:
                changed = self._changed
                if sent != self._membership_version:
                    sent = self._membership_version
                    members = [wire.member_to_wire(member) for member in self.members]
                    yield admin_pb2.Membership(
                        version=sent,
                        members=members,
                        routers=self.routers(),
                        shares=self._shares,
                        spares=self._spares,
                        ends=self._ends,
                        paused=self._paused,
                    )
                await changed.wait()
        finally:
            self._note_router(router, -1)

    def _note_router(self, router: str, change: int) -> None:
        if router:
            self._routers[router] += change
            self._membership_version += 1
            self.publish()
