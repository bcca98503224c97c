"""Evens running sequences out between decode workers while they serve: looks, asks `cluster.balance`, moves.

Part of the controller's event loop. One round at a time, and none while an upgrade or a drain is under way: these move
sequences themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from cluster.balance import Balance, Fullness, Shift, choose, fullness
from cluster.events import BALANCED
from cluster.mover import Mover
from cluster.pool import Incarnation
from penstock.config import ServeConfig
from penstock.errors import PenstockError
from penstock.grpc_server import Dial
from penstock.types import Epoch, Member, Role
from penstock.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)


class Workers(Protocol):
    """What it sees of the deployment."""

    def members(self, role: Role) -> Sequence[Member]: ...

    def load_of(self, member: Member) -> worker_pb2.Load | None: ...

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        """Each worker's last report, and when it came."""
        ...


class Note(Protocol):
    def __call__(self, subject: str, what: str, reason: str, epoch: Epoch) -> None: ...


@dataclass(slots=True)
class Counts:
    """Since the controller began."""

    rounds: int = 0
    moved: int = 0
    failed: int = 0
    last_reason: str = ""


class Balancing:
    def __init__(
        self, config: ServeConfig, workers: Workers, is_busy: Callable[[], bool], note: Note, dial: Dial
    ) -> None:
        """`is_busy`: others move sequences now. `note` takes what goes into the events."""
        self.config = config.balance
        self.counts = Counts()
        self._max_sequences = config.decode.max_batch_sequences
        self._workers = workers
        self._is_busy = is_busy
        self._note = note
        self._dial = dial
        self._balance = Balance(config.balance)
        self._mover = Mover(self._max_sequences, workers, dial)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval_s)
            try:
                await self.step(time.monotonic())
            except (PenstockError, grpc.aio.AioRpcError) as error:
                log.warning("evening out failed, and is tried again: %s", error)

    async def step(self, now_s: float) -> None:
        """One look, and the moves that follow from it."""
        members = self._workers.members(Role.DECODE)
        self._mover.forget(members)
        shift = None if self._is_busy() else self._balance.decide(self._look(members, now_s), now_s)
        if shift is not None:
            await self._move(shift)

    def _look(self, members: Sequence[Member], now_s: float) -> list[Fullness | None]:
        told = {incarnation.worker_id: at_s for incarnation, (_, at_s) in self._workers.loads().items()}
        found: list[Fullness | None] = []
        for member in members:
            load = self._workers.load_of(member)
            if load is None or now_s - told.get(member.worker_id, float("-inf")) > self.config.stale_s:
                found.append(None)
                continue
            used = load.total_pages - load.free_pages
            found.append(fullness(member, used, load.total_pages, load.num_open, self._max_sequences))
        return found

    async def _move(self, shift: Shift) -> None:
        load = self._workers.load_of(shift.source)
        async with self._dial(shift.source.address) as own:
            sequences = await self._mover.sequences(own)
            rooms = await self._mover.rooms(shift.source, [shift.target]) if sequences else []
            if not rooms or load is None:
                return
            described = await self._mover.describe(shift.source)
            capacity = load.total_pages * described.page_size
            for move in choose(shift, sequences, rooms[0], capacity, self._max_sequences, self.config.max_moves):
                moved, failed = await self._mover.migrate(own, shift.source, move)
                self._tell(shift, moved, failed)

    def _tell(self, shift: Shift, moved: int, failed: int) -> None:
        counts = self.counts
        counts.rounds += 1
        counts.moved += moved
        counts.failed += failed
        counts.last_reason = f"{moved} sequences to {shift.target.worker_id}: {shift.reason}"
        self._note(shift.source.worker_id, BALANCED, counts.last_reason, shift.source.epoch)
        log.info("%s gave %s", shift.source.worker_id, counts.last_reason)

    def tell(self) -> admin_pb2.BalanceStatus:
        counts = self.counts
        return admin_pb2.BalanceStatus(
            enabled=self.config.enabled,
            rounds=counts.rounds,
            moved=counts.moved,
            failed=counts.failed,
            last_reason=counts.last_reason,
        )
