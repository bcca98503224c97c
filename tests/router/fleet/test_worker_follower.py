"""Tests what a router books for one worker: by epoch, while it takes work, and until it has left."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from penstock.kv.events import KvEventLog
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.kv.page_places import ROOT
from penstock.rpc.server import make_channel
from penstock.types import WorkerId, WorkerLoad
from penstock.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.worker_fleet import WorkerFleet
from router.fleet.worker_follower import WorkerFollower
from router.routing.costs.inflight import NO_WORK, InflightWork
from tests.support.router.router_fakes import PAGE_SIZE, FakeWorker, all_followed, running_router, until
from worker.service import WorkerService

WORKER = WorkerId("prefill-0")
LINK = (WORKER, WorkerId("decode-0"))
HASHES = hash_pages(list(range(4 * PAGE_SIZE)), PAGE_SIZE, make_salt("r1"))
DESCRIPTION = worker_pb2.WorkerDescription(worker_id=WORKER, epoch=1, role="prefill", page_size=PAGE_SIZE)


class Followed:
    """Feeds event batches to a follower that has no connection."""

    def __init__(self) -> None:
        self.fleet = WorkerFleet()
        self.num_changes = 0
        self.load = WorkerLoad(free_pages=10, total_pages=10)
        self.log = KvEventLog(window=8)
        self._service = WorkerService(DESCRIPTION, self.log, lambda: self.load, lambda key: False)
        self._next_seq = 0
        self.follower = WorkerFollower(
            "nowhere:1", None, self.fleet._records, self.fleet.dial, on_change=self._on_change, on_load=lambda: None
        )
        self.follower.description = DESCRIPTION
        self.follower.worker_id = WORKER

    def _on_change(self) -> None:
        self.num_changes += 1

    def report(self) -> None:
        """Delivers the current log and load of the worker."""
        batch = self.log.read(self._next_seq)
        self._next_seq = batch.next_seq
        assert self.follower._apply(self._service._message(batch, ()))


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    made = Followed()
    yield made
    await made.fleet.stop()


async def test_a_worker_takes_work_from_its_first_report_until_it_leaves(followed: Followed) -> None:
    assert not followed.follower.takes_work
    followed.report()
    assert followed.follower.takes_work
    followed.load = WorkerLoad(free_pages=10, total_pages=10, leaving=True)
    followed.report()
    assert not followed.follower.takes_work
    assert followed.num_changes == 2


async def test_a_report_settles_the_work_that_it_shows(followed: Followed) -> None:
    followed.fleet.ledger.record(WORKER, InflightWork(1, prefill_tokens=7), time.monotonic() - 1.0)
    followed.report()
    assert followed.fleet.ledger.sent_to(WORKER) == NO_WORK


async def test_a_worker_that_has_left_has_no_bookings(followed: Followed) -> None:
    followed.log.stored(HASHES[:2], ROOT)
    followed.report()
    followed.fleet.ledger.record(WORKER, InflightWork(1), time.monotonic())
    followed.fleet.ledger.record(LINK, InflightWork(num_bytes=5), time.monotonic())
    assert followed.fleet.index.num_pages == 2
    await followed.follower.retire()
    assert not followed.follower.takes_work
    followed.log.stored(HASHES[2:], HASHES[1])
    followed.report()  # its last requests still run, so it still reports
    assert followed.fleet.index.num_pages == 0
    assert followed.fleet.ledger.totals() == []
    assert followed.fleet.ledger.link_bytes(LINK) == 0


async def test_a_worker_reports_at_once_that_its_routers_have_left() -> None:
    worker = await FakeWorker().start()
    async with make_channel(worker.address) as channel:
        watch = worker_pb2_grpc.WorkerStub(channel).WatchEvents(worker_pb2.WatchEventsRequest(), timeout=60)
        assert (await watch.read()).load.num_routers == 0
        async with running_router(worker) as router:
            while (await watch.read()).load.num_routers < 1:
                pass
            router.server.fleet.set_members([])
            while (await watch.read()).load.num_routers > 0:
                pass
            watch.cancel()


async def test_events_of_another_epoch_are_not_applied() -> None:
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        (follower,) = router.server.fleet.followers
        worker._description.epoch = 2
        worker.log.stored(HASHES, ROOT)
        worker.service.notify()
        await until(lambda: not follower.takes_work)
        assert router.server.fleet.index.match(HASHES) == {}


async def test_a_successor_at_the_same_address_starts_with_a_clean_record() -> None:
    worker = await FakeWorker().start()
    worker.log.stored(HASHES, ROOT)
    port = int(worker.address.rsplit(":", 1)[1])
    async with running_router(worker) as router:
        fleet = router.server.fleet
        assert fleet.index.num_pages == len(HASHES)
        fleet.ledger.record(LINK, InflightWork(num_bytes=5), time.monotonic())
        await worker.stop()
        successor = await FakeWorker(epoch=99).start(port)
        await until(lambda: [each.epoch for each in fleet.followers] == [99] and all_followed(router.server, 1))
        assert fleet.index.num_pages == 0
        assert fleet.ledger.link_bytes(LINK) == 0
        await successor.stop()
