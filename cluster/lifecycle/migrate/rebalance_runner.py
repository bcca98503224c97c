"""Rebalances running sequences between decode workers: observes, asks `rebalance_policy`, migrates.

Part of the controller's event loop. One round at a time, and none during an upgrade or a drain, which migrate sequences
themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from cluster.controller.event_log import BALANCED
from cluster.lifecycle.migrate.migration_calls import MigrationCalls
from cluster.lifecycle.migrate.rebalance_policy import (
    RebalancePolicy,
    RebalanceShift,
    WorkerFill,
    choose_sequences,
    fill_of,
)
from cluster.pools.pool import Incarnation
from penstock.config import ServeConfig
from penstock.errors import PenstockError
from penstock.rpc.server import Dial
from penstock.types import Epoch, Member, Role
from penstock.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)


class ObservedWorkers(Protocol):
    """The part of the deployment that a rebalance sees."""

    def members(self, role: Role) -> Sequence[Member]: ...

    def load_of(self, member: Member) -> worker_pb2.Load | None: ...

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        """Returns each worker's latest report and when it came."""
        ...


class NoteEvent(Protocol):
    """Writes to the event log."""

    def __call__(self, subject: str, what: str, reason: str, epoch: Epoch) -> None: ...


@dataclass(slots=True)
class RebalanceCounts:
    """Totals since the controller started."""

    rounds: int = 0
    migrated: int = 0
    failed: int = 0
    last_reason: str = ""


class RebalanceRunner:
    """Runs the policy at an interval and carries out its shifts."""

    def __init__(
        self, config: ServeConfig, workers: ObservedWorkers, is_busy: Callable[[], bool], note: NoteEvent, dial: Dial
    ) -> None:
        """`is_busy` says that sequences migrate for another reason. `note` writes to the event log."""
        self.config = config.balance
        self.counts = RebalanceCounts()
        self._max_sequences = config.decode.max_batch_sequences
        self._workers = workers
        self._is_busy = is_busy
        self._note = note
        self._dial = dial
        self._policy = RebalancePolicy(config.balance)
        self._calls = MigrationCalls(self._max_sequences, workers, dial)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval_s)
            try:
                await self.step(time.monotonic())
            except (PenstockError, grpc.aio.AioRpcError) as error:
                log.warning("a rebalance failed and will be retried: %s", error)

    async def step(self, now_s: float) -> None:
        """Observes the workers once and migrates what the policy asks for."""
        members = self._workers.members(Role.DECODE)
        self._calls.forget_others(members)
        shift = None if self._is_busy() else self._policy.decide(self._observe(members, now_s), now_s)
        if shift is not None:
            await self._migrate(shift)

    def _observe(self, members: Sequence[Member], now_s: float) -> list[WorkerFill | None]:
        reported_s = {incarnation.worker_id: at_s for incarnation, (_, at_s) in self._workers.loads().items()}
        fills: list[WorkerFill | None] = []
        for member in members:
            load = self._workers.load_of(member)
            if load is None or now_s - reported_s.get(member.worker_id, float("-inf")) > self.config.stale_s:
                fills.append(None)
                continue
            used = load.total_pages - load.free_pages
            fills.append(fill_of(member, used, load.total_pages, load.num_open, self._max_sequences))
        return fills

    async def _migrate(self, shift: RebalanceShift) -> None:
        load = self._workers.load_of(shift.source)
        async with self._dial(shift.source.address) as channel:
            sequences = await self._calls.list_sequences(channel)
            rooms = await self._calls.find_rooms(shift.source, [shift.target]) if sequences else []
            if not rooms or load is None:
                return
            description = await self._calls.describe(shift.source)
            capacity = load.total_pages * description.page_size
            for migration in choose_sequences(
                shift, sequences, rooms[0], capacity, self._max_sequences, self.config.max_migrations
            ):
                moved, failed = await self._calls.migrate(channel, shift.source, migration)
                self._count(shift, moved, failed)

    def _count(self, shift: RebalanceShift, moved: int, failed: int) -> None:
        counts = self.counts
        counts.rounds += 1
        counts.migrated += moved
        counts.failed += failed
        counts.last_reason = f"{moved} sequences to {shift.target.worker_id}: {shift.reason}"
        self._note(shift.source.worker_id, BALANCED, counts.last_reason, shift.source.epoch)
        log.info("%s migrated %s", shift.source.worker_id, counts.last_reason)

    def status(self) -> admin_pb2.BalanceStatus:
        """Returns the totals for `penstock status`."""
        counts = self.counts
        return admin_pb2.BalanceStatus(
            enabled=self.config.enabled,
            rounds=counts.rounds,
            migrated=counts.migrated,
            failed=counts.failed,
            last_reason=counts.last_reason,
        )
