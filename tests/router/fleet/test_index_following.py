"""Tests how a router follows workers' caches over gRPC: tiers, snapshots in parts, leaving, silent and mute workers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from penstock.config import IndexConfig
from penstock.kv.events import KvEventKind
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.kv.page_places import ROOT
from penstock.types import WorkerId
from router.fleet.worker_fleet import IndexTidyRunner
from router.routing.index.prefix_index import PrefixIndex
from tests.router.dispatch.test_failures import collect, request
from tests.support.router.router_fakes import PAGE_SIZE, FakeAdmin, FakeWorker, running_router, until
from worker import service as worker_service

PROMPT = list(range(300, 300 + 6 * PAGE_SIZE))
HASHES = hash_pages(PROMPT, PAGE_SIZE, make_salt("r1"))


async def test_tiers_are_followed_and_a_snapshot_comes_in_parts(monkeypatch):
    monkeypatch.setattr(worker_service, "_SNAPSHOT_PAGES", 2)
    worker = await FakeWorker().start()
    for number in range(10):  # more than the fake's window of 8, so a snapshot is read
        worker.log.stored([bytes([number]) * 16], ROOT)
    worker.log.stored(HASHES, ROOT)
    worker.log.moved(HASHES[3:], KvEventKind.ON_HOST)
    async with running_router(worker) as router:
        index = router.server.fleet.index
        assert index.stats.snapshots == 1
        assert index.match(HASHES) == {"decode-0": (6, 3, 3)}
        worker.log.moved(HASHES[4:], KvEventKind.ON_DISK)
        worker.log.stored(HASHES[:4], ROOT)
        worker.service.notify()
        await until(lambda: index.match(HASHES) == {"decode-0": (6, 4, 0)})
        text = router.server._metrics.render().decode()
        assert 'prefix_index_worker_pages{model_name="penstock-tiny",tier="device",worker="decode-0"} 14.0' in text
        assert 'prefix_index_worker_pages{model_name="penstock-tiny",tier="disk",worker="decode-0"} 2.0' in text
        assert 'prefix_index_snapshots_total{model_name="penstock-tiny"} 1.0' in text
        index.check_integrity()


async def test_a_large_cache_is_forgotten_when_its_worker_leaves():
    admin = await FakeAdmin().start()
    workers = [await FakeWorker("decode-0", epoch=1).start(), await FakeWorker("decode-1", epoch=2).start()]
    admin.set(*workers)
    workers[0].log.stored(hash_pages(range(20_000), 1, make_salt("r1")), ROOT)
    workers[1].log.stored(HASHES, ROOT)
    async with running_router(*workers, admin=admin) as router:
        index = router.server.fleet.index
        assert index.num_pages == 20_006
        admin.set(workers[1])
        await until(lambda: index.num_pages == 6)
        assert index.match(HASHES) == {"decode-1": (6, 6, 0)}
        index.check_integrity()
    await admin.stop()


async def test_prompts_sent_to_a_silent_worker_count_as_cached_there():
    worker = await FakeWorker().start()
    worker._description.silent_cache = True
    async with running_router(worker) as router:
        await collect(router.stub.Generate(request(token_ids=[*PROMPT, 5])))
        assert router.server.fleet.index.match(HASHES) == {"decode-0": (6, 6, 0)}


async def test_assumed_pages_expire_without_a_request():
    index = PrefixIndex(IndexConfig(approximate_ttl_s=100.0))
    index.note(WorkerId("decode-0"), HASHES, time.monotonic() - 1000.0)
    keeping = asyncio.create_task(IndexTidyRunner(index, every_s=0.01).run())
    await until(lambda: index.num_pages == 0)
    index.note(WorkerId("decode-0"), HASHES, time.monotonic() - 1000.0)
    await until(lambda: index.num_pages == 0)
    keeping.cancel()


async def test_a_worker_whose_hits_grow_without_page_events_is_noticed(caplog):
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        follower = router.server.fleet.followers[0]

        def mute_workers() -> str:
            text = router.server._metrics.render().decode()
            return next(line for line in text.splitlines() if line.startswith("penstock:prefix_index_mute_workers{"))

        assert mute_workers().endswith(" 0.0")
        for hits in (10, 20):
            worker.load = replace(worker.load, cache=replace(worker.load.cache, device_hits=hits))
            worker.service.notify()
            await until(lambda hits=hits: follower.load.cache.device_hits == hits)
        assert mute_workers().endswith(" 1.0")
        assert sum("no KV events" in record.message for record in caplog.records) == 1
        worker.log.stored(HASHES, ROOT)
        worker.service.notify()
        await until(lambda: not follower.is_mute)
        assert mute_workers().endswith(" 0.0")
