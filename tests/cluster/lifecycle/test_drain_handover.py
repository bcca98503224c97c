"""Tests to which workers a drain hands over cached pages: only those of its revision. Small gRPC servers in this
process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from cluster.lifecycle.drain import Drain, HandoverBounds
from penstock.rpc.server import GrpcServer
from penstock.types import Epoch, Member, Role, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.lifecycle.test_drain import FakeDecode, FakeView

BOUNDS = HandoverBounds(max_bytes=1000, timeout_s=5.0)


@dataclass
class CachingWorker(FakeDecode, worker_pb2_grpc.PageHandoverServicer):
    """Stands in for a worker of one revision, which the digest of its layout represents."""

    revision: str = "old"
    handed: list[worker_pb2.HandOverRequest] = field(default_factory=list)

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        return worker_pb2.WorkerDescription(page_size=16, kv_digest="same", layout_digest=self.revision)

    async def HandOver(
        self, request: worker_pb2.HandOverRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HandOverResponse:
        self.handed.append(request)
        return worker_pb2.HandOverResponse(num_pages=3)


@contextlib.asynccontextmanager
async def fleet(**workers: tuple[Role, CachingWorker]) -> AsyncIterator[list[Member]]:
    """Yields the workers as members; the drained one is the first."""
    names = worker_pb2.DESCRIPTOR.services_by_name
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for number, (name, (role, worker)) in enumerate(workers.items(), start=1):
            server = GrpcServer([names["Worker"], names["DecodeWorker"], names["PageHandover"]])
            worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.server)
            worker_pb2_grpc.add_DecodeWorkerServicer_to_server(worker, server.server)
            worker_pb2_grpc.add_PageHandoverServicer_to_server(worker, server.server)
            address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
            stack.push_async_callback(server.stop)
            members.append(Member(WorkerId(name), Epoch(number), role, address))
        yield members


@dataclass
class View(FakeView):
    def load_of(self, member: Member) -> worker_pb2.Load:
        return worker_pb2.Load(free_pages=self.free_pages, total_pages=100)


async def targets_of(source: CachingWorker, members: list[Member]) -> list[tuple[str, int]]:
    """Returns to which workers the first member's drain hands over, and at most how many pages each."""
    drain = Drain(members[0], 20.0, 64, View(source, members), handover=BOUNDS)
    await drain.run()
    handed = {(target.worker_id, target.max_pages) for request in source.handed for target in request.targets}
    assert drain.progress.num_pages_handed == 3 * len(source.handed)
    return sorted(handed)


async def test_pages_are_handed_over_only_to_workers_of_the_same_revision() -> None:
    source = CachingWorker()
    workers = {
        "decode-0": (Role.DECODE, source),
        "decode-1": (Role.DECODE, CachingWorker(revision="new")),
        "decode-2": (Role.DECODE, CachingWorker()),
        "prefill-0": (Role.PREFILL, CachingWorker()),
    }
    async with fleet(**workers) as members:
        assert await targets_of(source, members) == [("decode-2", 25)]  # a quarter of its pool
        assert {request.max_bytes for request in source.handed} == {1000}


async def test_nothing_is_handed_over_if_all_other_workers_have_another_revision() -> None:
    source = CachingWorker(revision="new")
    async with fleet(decode0=(Role.DECODE, source), decode1=(Role.DECODE, CachingWorker())) as members:
        assert await targets_of(source, members) == []


async def test_the_last_prefill_workers_pages_go_to_decode_workers_of_its_revision() -> None:
    source = CachingWorker()
    workers = {
        "prefill-0": (Role.PREFILL, source),
        "decode-0": (Role.DECODE, CachingWorker(revision="new")),
        "decode-1": (Role.DECODE, CachingWorker()),
    }
    async with fleet(**workers) as members:
        assert await targets_of(source, members) == [("decode-1", 25)]
