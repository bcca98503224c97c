"""Tests page hand-over: which cached pages of a draining worker go where, and that the remaining workers use them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.server import DecodeServer
from engine.cache.prefix_cache import PrefixCache
from engine.engine import Engine
from engine.generate import generate
from kv_transfer.receive import receiver as transfer_receiver
from penstock.client.async_client import AsyncClient
from penstock.client.results import GenerateResult
from penstock.config import EngineConfig
from penstock.errors import TransferError
from penstock.kv.events import KvEventLog
from penstock.kv.page_hash import hash_pages
from penstock.rpc.server import make_channel
from penstock.types import CachedPage, Epoch, HandoverTarget, PageHash, PageId, Role, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from tests.cluster.lifecycle.test_flips import config
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.hosted import hosted
from tests.support.serving import (
    GREEDY,
    SALT,
    TIMEOUT_S,
    Answer,
    caller,
    until,
    wait_until_empty,
    worker_config,
    workers,
)
from worker.handover.client import wanted_pages
from worker.handover.policy import BATCH_BYTES, BATCH_PAGES, assign_pages, first_batch_size, next_batch_size

SYSTEM = [(3 * i) % 300 + 2 for i in range(64)]
PROMPTS = [SYSTEM + [(7 * i + 31 * n) % 300 + 2 for i in range(40 + 16 * n)] for n in range(3)]
PAGE = 16
DOCUMENTS = [[(11 * i + 97 * n) % 900 + 20 for i in range(100)] for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@functools.cache
def reference_engine(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))


# The policy.


def chain(tokens: Sequence[int]) -> list[tuple[PageHash, PageHash | None]]:
    hashes = hash_pages(list(tokens), 1, SALT)
    return list(zip(hashes, [None, *hashes], strict=False))


def target(number: int, max_pages: int = 1000) -> HandoverTarget:
    return HandoverTarget(WorkerId(f"decode-{number}"), Epoch(number), f"host:{number}", max_pages)


@given(page_bytes=st.integers(1, 1 << 27), byte_s=st.floats(1e-12, 1e-3), batch_s=st.floats(1e-3, 10.0))
def test_batches_take_the_time_that_is_asked_for(page_bytes: int, byte_s: float, batch_s: float) -> None:
    most = max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes))
    size = first_batch_size(page_bytes)
    assert 1 <= size <= most
    for _ in range(8):
        size = next_batch_size(size, size * page_bytes * byte_s, batch_s, page_bytes)
        assert 1 <= size <= most
    assert size in (1, most) or size * page_bytes * byte_s == pytest.approx(batch_s, abs=page_bytes * byte_s)


prompts_ = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


@given(prompts=prompts_, limits=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_every_page_goes_to_a_target_and_never_without_its_parent(prompts: list[list[int]], limits: list[int]) -> None:
    pages = list(dict.fromkeys(page for prompt in prompts for page in chain(prompt)))
    targets = [target(number, limit) for number, limit in enumerate(limits)]
    chosen = assign_pages(pages, targets)
    for each in targets:
        there = set()
        assert len(chosen[each.epoch]) <= each.max_pages
        for index in chosen[each.epoch]:
            page_hash, parent = pages[index]
            assert parent is None or parent in there
            there.add(page_hash)
    roomy = assign_pages(pages, [target(number) for number in range(len(limits))])
    assert set().union(*roomy.values()) == set(range(len(pages)))
    # A second round gives the same.
    assert roomy == assign_pages(pages, [target(number) for number in range(len(limits))])


def test_a_common_trunk_goes_to_every_target_and_its_branches_are_divided() -> None:
    trunk = list(range(4))
    pages = list(dict.fromkeys(page for n in range(40) for page in chain([*trunk, 100 + n, 200 + n])))
    chosen = assign_pages(pages, [target(1), target(2)])
    sizes = [len(indexes) for indexes in chosen.values()]
    assert sum(sizes) == len(pages) + len(trunk)  # only the trunk is sent twice
    assert min(sizes) > 20


def cached(prompts: Sequence[Sequence[int]], num_pages: int = 64) -> PrefixCache:
    """Returns a cache with each prompt's pages, computed one prompt after the other."""
    cache = PrefixCache(num_pages, 1, KvEventLog())
    pool = cache.pool
    for prompt in prompts:
        hashes = hash_pages(list(prompt), 1, SALT)
        held = cache.match(hashes)
        pages = [*held, *pool.allocate(len(hashes) - len(held))]
        cache.insert(hashes, pages)
        pool.release(pages)
    return cache


@given(prompts=prompts_, limit=st.integers(0, 40))
def test_the_hottest_pages_include_their_parents_and_can_be_grafted_elsewhere(
    prompts: list[list[int]], limit: int
) -> None:
    cache = cached(prompts, 200)
    hot = cache.hottest(limit)
    assert len(hot) <= limit
    assert len(cache.hottest(200)) == cache.num_cached
    other = PrefixCache(64, 1, KvEventLog())
    pool = other.pool
    wanted = other.lacking([(page.page_hash, page.parent) for page in hot])
    assert wanted == list(range(len(hot)))
    fresh = pool.allocate(len(hot))
    pairs = list(zip(hot, fresh, strict=True))
    assert all(other.graft(each.page_hash, each.parent, page) for each, page in pairs)
    assert not any(other.graft(each.page_hash, each.parent, page) for each, page in pairs)
    pool.release(fresh)
    other.check_integrity()
    for prompt in prompts:
        hashes = hash_pages(prompt, 1, SALT)
        assert other.peek(hashes) == next(
            (n for n, page_hash in enumerate(hashes) if page_hash not in {page.page_hash for page in hot}), len(hashes)
        )
    assert other.lacking([(page.page_hash, page.parent) for page in hot]) == []


def test_pages_with_hits_go_first_then_the_latest() -> None:
    cache = cached([[1, 2, 3], [1, 2, 4], [7, 8], [5, 6]])
    order = [page.page_hash for page in cache.hottest(100)]
    assert order[:2] == hash_pages([1, 2], 1, SALT)
    assert order[2:4] == hash_pages([5, 6], 1, SALT)
    assert [page.page_hash for page in cache.hottest(3)][:2] == order[:2]
    assert cache.graft(PageHash(b"x" * 16), PageHash(b"nobody's" * 2), order[0]) is False  # type: ignore[arg-type]


# Real workers.


async def hand_over(
    source: PrefillServer | DecodeServer, *targets: PrefillServer | DecodeServer, max_bytes: int = 1 << 30
) -> worker_pb2.HandOverResponse:
    request = worker_pb2.HandOverRequest(
        targets=[
            worker_pb2.HandOverTarget(worker_id=f"peer-{n}", epoch=target.epoch, address=target.address, max_pages=100)
            for n, target in enumerate(targets)
        ],
        max_bytes=max_bytes,
        timeout_ms=20_000,
    )
    async with make_channel(source.address) as channel:
        return await worker_pb2_grpc.PageHandoverStub(channel).HandOver(request, timeout=TIMEOUT_S)


async def ask(decode: DecodeServer, prompt: list[int], *prefill: PrefillServer) -> Answer:
    async with caller(decode) as to_it:
        answer = await to_it.answer(to_it.submit(prompt, prefill=prefill))
    assert answer.error is None
    assert answer.timing is not None
    return answer


def cached_tokens(answer: Answer) -> int:
    assert answer.timing is not None
    return answer.timing.cached_tokens


@pytest.mark.parametrize("wire", ["shm", "torch"])
async def test_a_remaining_worker_serves_the_prompts_of_a_draining_one_from_its_cache(model: Path, wire: str) -> None:
    own = {"decode": {"placement": "local"}, "transfer": {"transport": wire}}
    async with workers(
        *(worker_config(Role.DECODE, model, name, **own) for name in ("leaving", "staying", "cold"))  # type: ignore[arg-type]
    ) as servers:
        leaving, staying, cold = (server for server in servers if isinstance(server, DecodeServer))
        for prompt in PROMPTS:
            await ask(leaving, prompt)
        await ask(staying, PROMPTS[0])
        report = await hand_over(leaving, staying)
        assert not report.problems
        assert report.num_known == (len(PROMPTS[0]) + GREEDY.max_tokens - 1) // PAGE
        assert report.num_pages * leaving.shell.source.page_bytes == report.num_bytes
        assert report.num_pages == staying.shell.intake.num_received > 0
        again = await hand_over(leaving, staying)  # a second round has nothing to send
        assert (again.num_pages, again.num_known) == (0, report.num_pages + report.num_known)
        for prompt in PROMPTS:
            warm, recomputed = await ask(staying, prompt), await ask(cold, prompt)
            expected = generate(reference_engine(model), prompt, GREEDY, SALT, use_prefix_cache=False)
            assert warm.token_ids == recomputed.token_ids == expected
            assert cached_tokens(warm) == (len(prompt) - 1) // PAGE * PAGE
            assert cached_tokens(recomputed) <= len(SYSTEM)  # the prompts share only this
        await wait_until_empty(leaving, staying, cold)


async def test_prefill_workers_hand_over_too_and_announce_the_pages(model: Path) -> None:
    async with workers(
        worker_config(Role.PREFILL, model, "leaving"),
        worker_config(Role.PREFILL, model, "staying"),
        worker_config(Role.DECODE, model, "decode", engine={"prefix_caching": False}),
    ) as (leaving, staying, decode):
        assert isinstance(leaving, PrefillServer)
        assert isinstance(staying, PrefillServer)
        assert isinstance(decode, DecodeServer)
        first = await ask(decode, PROMPTS[2], leaving)
        bound = 5 * leaving.shell.source.page_bytes
        assert (await hand_over(leaving, staying, max_bytes=bound)).num_bytes == bound
        assert not (await hand_over(leaving, staying)).problems
        async with make_channel(staying.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).WatchEvents(worker_pb2.WatchEventsRequest(), timeout=TIMEOUT_S)
            report = await call.read()
            assert report.payload.count(hash_pages(PROMPTS[2], PAGE, SALT)[-1]) == 1
        second = await ask(decode, PROMPTS[2], staying)
        assert second.token_ids == first.token_ids
        assert cached_tokens(first) == 0
        assert cached_tokens(second) == (len(PROMPTS[2]) - 1) // PAGE * PAGE
        await wait_until_empty(leaving, staying, decode)


async def test_another_revision_receives_nothing_and_damaged_pages_are_dropped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_checkpoint("llama", tmp_path, rope_theta=5000.0)
    local = {"placement": "local"}
    async with workers(
        worker_config(Role.DECODE, model, "leaving", decode=local),
        worker_config(Role.DECODE, other, "newer", decode=local),
        worker_config(Role.DECODE, model, "full", engine={"num_pages": 16}, decode=local),
        worker_config(Role.DECODE, model, "staying", decode=local),
    ) as (leaving, newer, full, staying):
        assert isinstance(leaving, DecodeServer)
        await ask(leaving, PROMPTS[1])
        refused = await hand_over(leaving, newer)
        assert (refused.num_pages, refused.num_bytes) == (0, 0)
        assert "layout_digest" in refused.problems[0]
        part = await hand_over(leaving, full)  # limited to the target's spare pages
        assert 0 < part.num_pages < 16
        whole = transfer_receiver.row_checksums
        damage = lambda pool, pages, rows: [1, *whole(pool, pages, rows)[1:]]  # noqa: E731
        monkeypatch.setattr(transfer_receiver, "row_checksums", damage)
        damaged = await hand_over(leaving, staying)
        assert "checksums differ" in damaged.problems[0]
        assert damaged.num_pages == 0
        assert staying.worker._engine.prefix_cache.num_cached == 0
        with pytest.raises(Exception, match="this worker's own"):
            await hand_over(leaving, leaving)
        await wait_until_empty(leaving, newer, full, staying)


async def test_a_source_that_breaks_off_leaves_no_page_held(model: Path) -> None:
    async with workers(worker_config(Role.DECODE, model, "staying")) as (staying,):
        assert isinstance(staying, DecodeServer)
        start = worker_pb2.ReceivePagesStart(
            transfer=worker_pb2.TransferKey(transfer_id="t", sender_epoch=1, receiver_epoch=staying.epoch),
            pages=[worker_pb2.CachedPage(hash=b"a" * 16), worker_pb2.CachedPage(hash=b"b" * 16, parent=b"a" * 16)],
            layout_digest=staying.shell.source.layout_digest,
            worker_id="gone",
            address="127.0.0.1:1",
        )
        async with make_channel(staying.address) as channel:
            call = worker_pb2_grpc.PageHandoverStub(channel).ReceivePages()
            await call.write(worker_pb2.ReceivePagesCommand(start=start))
            assert len((await call.read()).destination.pages) == 2
            call.cancel()
        await wait_until_empty(staying)  # its address refuses connections, so it cannot write
        assert staying.shell.intake.num_open == 0


# A whole deployment.


@pytest.mark.parametrize("handover_bytes", [1 << 30, 0])
async def test_requests_after_a_drain_hit_the_cache_only_with_a_hand_over(
    handover_bytes: int,
) -> None:
    async with hosted(config(prefill=0, decode=2, handover_bytes=handover_bytes)) as deployment:
        async with AsyncClient(deployment.grpc, timeout_s=60) as client:

            async def again() -> list[GenerateResult]:
                return [await client.complete(prompt, max_tokens=8, temperature=0.0) for prompt in DOCUMENTS]

            first = await again()
            counts = Counter(result.timing.decode_worker for result in first)
            busiest = max(counts, key=lambda worker_id: counts[worker_id])
            drain = deployment.controller.draining.drain(busiest)
            async for progress in drain.follow():
                last = progress
            second = await again()
        assert [result.token_ids for result in second] == [result.token_ids for result in first]
        hits = [
            after.timing.cached_tokens
            for before, after in zip(first, second, strict=True)
            if before.timing.decode_worker == busiest
        ]
        full = (len(DOCUMENTS[0]) - 1) // PAGE * PAGE
        if handover_bytes:
            assert hits == [full] * len(hits)
            assert last.num_pages_handed >= len(hits) * full // PAGE
        else:
            assert hits == [0] * len(hits)
            assert last.num_pages_handed == 0
    assert set(deployment.pinned) == {0}


async def test_an_unverifiable_batch_is_refused_and_leaves_nothing(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"decode": {"placement": "local"}}
    async with workers(
        *(worker_config(Role.DECODE, model, name, **own) for name in ("leaving", "staying"))  # type: ignore[arg-type]
    ) as (leaving, staying):
        assert isinstance(leaving, DecodeServer)
        assert isinstance(staying, DecodeServer)
        await ask(leaving, PROMPTS[0])
        receiver = staying.shell.open_receiver()

        def fail(*_: object) -> list[int]:
            raise OSError("the device is gone")

        with monkeypatch.context() as broken:
            broken.setattr(receiver, "checksums", fail)
            report = await hand_over(leaving, staying)
        (problem,) = report.problems
        assert "manifest: is refused: the checksums of its pages could not be computed here" in problem
        assert (report.num_pages, staying.shell.intake.num_received) == (0, 0)
        assert "computing the checksums of a batch failed" in caplog.text
        assert "the device is gone" in caplog.text
        intake = staying.shell.intake
        record = intake.on_manifest
        with monkeypatch.context() as lying:
            other = lambda key, count, hashes, sums: record(key, count, [PageHash(bytes(16)), *hashes[1:]], sums)  # noqa: E731
            lying.setattr(intake, "on_manifest", other)
            report = await hand_over(leaving, staying)
        assert "manifest: is refused: its hashes differ from the announced ones" in report.problems[0]
        assert (report.num_pages, intake.num_received) == (0, 0)
        await wait_until_empty(leaving, staying)
        await until(lambda: intake.num_open == 0)
        again = await hand_over(leaving, staying)
        assert not again.problems
        assert again.num_pages == staying.shell.intake.num_received > 0


@pytest.mark.parametrize(("wanted", "pages"), [([0, 0], [1, 2]), ([2], [1]), ([0, 1], [1]), ([], [1])])
def test_a_destination_that_does_not_fit_the_batch_is_the_targets_error(wanted: list[int], pages: list[int]) -> None:
    """It arrives over a network, so it must neither end the step loop nor read beyond the batch."""
    batch = [CachedPage(PageHash(bytes([number]) * 16), None, PageId(number)) for number in range(2)]
    with pytest.raises(TransferError, match="destination: pages"):
        wanted_pages(batch, worker_pb2.ReceivePagesDestination(wanted=wanted, pages=pages))
    fits = worker_pb2.ReceivePagesDestination(wanted=[1, 0], pages=[5, 3])
    assert wanted_pages(batch, fits) == batch[::-1]
