"""What is asked of decode workers to move sequences between them: who runs what, who has room, and the move itself.

For drains (`cluster/drain.py`) and for balancing (`cluster/balancing.py`); what moves where is decided there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import grpc.aio

from cluster.moves import Movable, Move, Room
from penstock.grpc_server import Dial
from penstock.types import Epoch, Member, RequestId
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 5.0
_MOVE_TIMEOUT_S = 60.0  # of one round; each sequence has limits of its own


class Loads(Protocol):
    def load_of(self, member: Member) -> worker_pb2.Load | None:
        """Its last report; None where there is none."""
        ...


class Mover:
    """Asks. Its methods raise grpc.aio.AioRpcError where a worker does not answer, but for `migrate`."""

    def __init__(self, max_sequences: int, loads: Loads, dial: Dial) -> None:
        """`max_sequences` is what a decode worker holds at most."""
        self._max_sequences = max_sequences
        self._loads = loads
        self._dial = dial
        self._described: dict[Epoch, worker_pb2.WorkerDescription] = {}

    async def sequences(self, own: grpc.aio.Channel) -> list[Movable]:
        """That could move away now."""
        stub = worker_pb2_grpc.DecodeWorkerStub(own)
        listed = await stub.ListSequences(worker_pb2.ListSequencesRequest(), timeout=_ASK_TIMEOUT_S)
        return [Movable(RequestId(one.request_id), one.num_tokens, one.num_tokens_left) for one in listed.sequences]

    async def rooms(self, source: Member, others: Iterable[Member]) -> list[Room]:
        """Of those that could use the source's KV."""
        own = await self.describe(source)
        rooms = []
        for member in others:
            load = self._loads.load_of(member)
            if member.epoch == source.epoch or load is None:
                continue
            described = await self.describe(member)
            if described.kv_digest == own.kv_digest:
                free_sequences = self._max_sequences - load.num_open
                free_tokens = load.free_pages * described.page_size
                rooms.append(Room(member.worker_id, member.epoch, member.address, free_tokens, free_sequences))
        return rooms

    async def describe(self, member: Member) -> worker_pb2.WorkerDescription:
        if member.epoch not in self._described:
            async with self._dial(member.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_ASK_TIMEOUT_S)
            self._described[member.epoch] = answer
        return self._described[member.epoch]

    def forget(self, known: Sequence[Member]) -> None:
        """Whatever is not among them."""
        epochs = {member.epoch for member in known}
        self._described = {epoch: one for epoch, one in self._described.items() if epoch in epochs}

    async def migrate(self, own: grpc.aio.Channel, source: Member, move: Move) -> tuple[int, int]:
        """How many have moved, and how many were tried and go on where they were."""
        target = move.target
        request = worker_pb2.MigrateRequest(
            worker_id=target.worker_id,
            epoch=target.epoch,
            address=target.address,
            request_ids=move.request_ids,
            source_address=source.address,
        )
        try:
            answer = await worker_pb2_grpc.DecodeWorkerStub(own).Migrate(request, timeout=_MOVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s: moving to %s failed: %s", source.worker_id, target.worker_id, error.details())
            return 0, 0
        for failed in answer.failed:
            log.info("%s: %s stays: %s", source.worker_id, failed.request_id, failed.error.message)
        return len(answer.moved), len(answer.failed)
