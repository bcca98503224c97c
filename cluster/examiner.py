"""Asks each worker for the known answer, before it is a member and from time to time after that.

Says when and through whom; `cluster.proving` asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.canary import Judge
from cluster.pool import Incarnation
from cluster.pools import Pools
from cluster.proving import Poisoned
from cluster.publication import Publication
from cluster.supervised import Started
from penstock.errors import PenstockError
from penstock.types import Member, Role

log = logging.getLogger(__name__)


class Proves(Protocol):
    """Asks a worker for an answer that is known."""

    judge: Judge

    async def prove(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        """Raises Poisoned where the answer is wrong, or Unavailable where there is none."""
        ...


class Examiner:
    def __init__(
        self,
        proving: Proves,
        pools: Pools,
        publication: Publication,
        keep_record: Callable[[], None],
        interval_s: float,
    ) -> None:
        """`keep_record` is called after each answer: a successor knows them too. `interval_s` 0: only at first."""
        self.asks_again = interval_s > 0.0
        self._proving = proving
        self._pools = pools
        self._publication = publication
        self._keep_record = keep_record
        self._interval_s = interval_s

    async def prove_first(self, incarnation: Incarnation, started: Started) -> None:
        """Before anybody else asks it anything. Raises Poisoned or Unavailable."""
        self._pools.of(incarnation).on_progress(incarnation, "answers its first request")
        self._publication.publish()
        role = Role(incarnation.pool_name)
        while role is Role.PREFILL and not self._pools.can_decode:
            await self._publication.next_change()  # it can only be asked through a decode worker
        await self._prove(Member(incarnation.worker_id, started.epoch, role, started.address))

    async def prove_again(self, incarnation: Incarnation) -> str:
        """For ever, or until it raises Poisoned. A question without an answer says nothing: leases tell whether it
        lives."""
        while True:
            await asyncio.sleep(self._interval_s)
            members = self._publication.members
            member = next((one for one in members if one.worker_id == incarnation.worker_id), None)
            if member is None:
                continue  # it is doubted, or drained
            try:
                await self._prove(member)
            except Poisoned:
                raise
            except PenstockError as error:
                log.info("%s: %s", incarnation.worker_id, error.message)

    async def _prove(self, member: Member) -> None:
        others = [one for one in self._pools.members() if one.epoch != member.epoch]
        decode, prefill = ([one for one in others if one.role is role] for role in (Role.DECODE, Role.PREFILL))
        try:
            await self._proving.prove(member, decode, prefill)
        finally:
            self._keep_record()
