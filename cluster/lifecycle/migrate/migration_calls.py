"""Calls to decode workers about migration: which sequences they run, how much room they have, and migrating itself.

Drains and the rebalance runner use it; they decide which sequences migrate where.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import grpc.aio

from cluster.lifecycle.migrate.migration_policy import MigratableSequence, PlannedMigration, TargetRoom
from penstock.rpc.server import Dial
from penstock.types import Epoch, Member, RequestId
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_MIGRATE_TIMEOUT_S = 60.0  # of one round; each sequence has limits of its own


class LoadReports(Protocol):
    """Load reports by worker."""

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        """Returns its latest report, or None."""
        ...


class MigrationCalls:
    """Makes calls. Methods raise grpc.aio.AioRpcError if a worker does not answer, except `migrate`."""

    def __init__(self, max_sequences: int, loads: LoadReports, dial: Dial) -> None:
        """`max_sequences` is what a decode worker holds at most."""
        self._max_sequences = max_sequences
        self._loads = loads
        self._dial = dial
        self._descriptions: dict[Epoch, worker_pb2.WorkerDescription] = {}

    async def list_sequences(self, channel: grpc.aio.Channel) -> list[MigratableSequence]:
        """Returns the sequences that could migrate now."""
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        listed = await stub.ListSequences(worker_pb2.ListSequencesRequest(), timeout=_CALL_TIMEOUT_S)
        return [
            MigratableSequence(RequestId(sequence.request_id), sequence.num_tokens, sequence.num_tokens_left)
            for sequence in listed.sequences
        ]

    async def find_rooms(self, source: Member, others: Iterable[Member]) -> list[TargetRoom]:
        """Returns the room at each worker that could use the source's KV."""
        own = await self.describe(source)
        rooms = []
        for member in others:
            load = self._loads.load_of(member)
            if member.epoch == source.epoch or load is None:
                continue
            description = await self.describe(member)
            if description.kv_digest == own.kv_digest:
                free_sequences = self._max_sequences - load.num_open
                free_tokens = load.free_pages * description.page_size
                rooms.append(TargetRoom(member.worker_id, member.epoch, member.address, free_tokens, free_sequences))
        return rooms

    async def describe(self, member: Member) -> worker_pb2.WorkerDescription:
        """Returns a worker's description, asked once for each incarnation."""
        if member.epoch not in self._descriptions:
            async with self._dial(member.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_CALL_TIMEOUT_S)
            self._descriptions[member.epoch] = description
        return self._descriptions[member.epoch]

    def forget_others(self, known: Sequence[Member]) -> None:
        """Drops the descriptions of all workers that are not in `known`."""
        epochs = {member.epoch for member in known}
        self._descriptions = {epoch: kept for epoch, kept in self._descriptions.items() if epoch in epochs}

    async def migrate(self, channel: grpc.aio.Channel, source: Member, migration: PlannedMigration) -> tuple[int, int]:
        """Migrates sequences; returns how many have migrated and how many stayed where they were."""
        target = migration.target
        request = worker_pb2.MigrateRequest(
            worker_id=target.worker_id,
            epoch=target.epoch,
            address=target.address,
            request_ids=migration.request_ids,
            source_address=source.address,
        )
        try:
            response = await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=_MIGRATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s: migrating to %s failed: %s", source.worker_id, target.worker_id, error.details())
            return 0, 0
        for failed in response.failed:
            log.info("%s: %s stays: %s", source.worker_id, failed.request_id, failed.error.message)
        return len(response.migrated), len(response.failed)
