"""Tests transfers between different page sizes and shares of the heads, over every transport.

Tokens stay the same; incompatible layouts are refused by field, and their prompts are computed locally.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.server import DecodeServer
from engine.cache.kv_layout import KVLayout
from engine.cache.pool_memory import allocate_pool
from engine.engine import Engine
from engine.generate import generate
from kv_transfer.layout import staging
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.send.layout_paths import MAX_STAGED_PATHS
from kv_transfer.send.sender import TransferSender
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports import nixl_agent
from penstock.config import EngineConfig
from penstock.errors import TransferRefused
from penstock.kv.page_hash import hash_pages, make_salt
from penstock.types import Epoch, PageId, Role, SamplingParams
from prefill_worker.server import PrefillServer
from tests.router.api.test_grpc_service import collect, request
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.router.router_fakes import MODEL, running_router, until
from tests.support.serving import GREEDY, SALT, caller, wait_until_empty, worker_config, workers
from tests.support.transfer.transfer_pair import PREFILL, Log, config, key

SEEDED = SamplingParams(max_tokens=16, temperature=0.75, top_p=0.875, seed=7, repetition_penalty=1.25, ignore_eos=True)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, page_size=16, head_dim=8, dtype="float32", model_revision="r1")
NUM_PAGES = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))


def make_prompts(seed: int) -> list[list[int]]:
    """Returns prompts whose lengths lie around page ends; the last two share a long prefix with the third."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(2, VOCAB_SIZE), k=length) for length in (1, 24, 129, 17, 64, 100)]
    return [*prompts, prompts[2][:70] + prompts[3][:9], prompts[2][:128]]


def wanted_from(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    return [generate(engine, prompt, sampling, SALT, use_prefix_cache=False) for prompt in prompts]


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 64), (64, 16), (8, 24)])
@pytest.mark.parametrize("transport", ["shm", "torch", "nixl"])
async def test_two_page_sizes_give_the_tokens_of_one_process(
    transport: str, prefill_size: int, decode_size: int, model: Path, reference: Engine
) -> None:
    """Covers chunks that end inside pages of either size, prefixes cached at either end, and checksums."""
    if transport == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed")
    prompts = make_prompts(seed=decode_size)
    wanted = wanted_from(reference, prompts, SEEDED)
    transport = {"transport": transport, "checksums": True}
    async with workers(
        worker_config(
            Role.PREFILL,
            model,
            engine={"page_size": prefill_size},
            prefill={"max_batch_tokens": 40},
            transfer=transport,
        ),
        worker_config(Role.DECODE, model, engine={"page_size": decode_size}, transfer=transport),
    ) as (prefill, decode):
        async with caller(decode) as router:
            for again in (False, True):
                streams = [router.submit(prompt, SEEDED, [prefill]) for prompt in prompts]
                answers = [await router.answer(stream) for stream in streams]
                assert [answer.token_ids for answer in answers] == wanted
                timings = [answer.timing for answer in answers if answer.timing]
                assert {timing.prefill_worker for timing in timings} == {"prefill"}
                moved = [timing.pages_moved for timing in timings]
                if not again:
                    alone = (0, 1, 3, 4, 5)  # the others share pages, in no fixed order
                    assert [moved[i] for i in alone] == [-(-len(prompts[i]) // decode_size) for i in alone]
                else:  # only pages that the decode worker does not hold in full
                    assert moved == [-(-len(p) // decode_size) - (len(p) - 1) // decode_size for p in prompts]
            assert decode.worker._transfers.num_mismatches == 0
        await wait_until_empty(prefill, decode)


async def test_a_prefix_cached_only_by_the_prefill_worker_is_sent(model: Path, reference: Engine) -> None:
    prompt = make_prompts(seed=1)[2]
    (wanted,) = wanted_from(reference, [prompt], GREEDY)
    async with workers(
        worker_config(Role.PREFILL, model, engine={"page_size": 16}),
        worker_config(Role.DECODE, model, engine={"page_size": 24, "prefix_caching": False}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            for cached in (0, 128):
                answer = await router.answer(router.submit(prompt, GREEDY, [prefill]))
                assert answer.token_ids == wanted
                assert answer.timing is not None
                assert (answer.timing.cached_tokens, answer.timing.pages_moved) == (cached, 6)


async def test_preemption_with_two_page_sizes_loses_no_token(model: Path, reference: Engine) -> None:
    sampling = replace(GREEDY, max_tokens=60)
    prompts = [[seed] * 40 for seed in range(2, 8)]
    wanted = wanted_from(reference, prompts, sampling)
    async with workers(
        worker_config(Role.PREFILL, model, engine={"page_size": 16}),
        worker_config(Role.DECODE, model, engine={"page_size": 24, "num_pages": 10, "prefix_caching": False}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            for _ in range(50):  # repeats until three of them run at once, which happens unless their prefills are late
                streams = [router.submit(prompt, sampling, [prefill]) for prompt in prompts]
                answers = [await router.answer(stream) for stream in streams]
                assert [answer.token_ids for answer in answers] == wanted
                if any(answer.timing.num_preemptions for answer in answers if answer.timing):
                    break
            else:
                raise AssertionError("no sequence was preempted")
        await wait_until_empty(prefill, decode)


async def test_corrupted_pages_of_another_size_are_recomputed(
    model: Path, reference: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums cover the sender's pool and not the staged copy, so they detect a fault in the staging."""
    prompt = make_prompts(seed=2)[2]
    (wanted,) = wanted_from(reference, [prompt], GREEDY)
    stage = staging.Staging.stage

    def corrupted(self: staging.Staging, *arguments: object) -> list[PageId] | None:
        rows = stage(self, *arguments)  # type: ignore[arg-type]
        self.pages.tensor[rows or []] += 1
        return rows

    monkeypatch.setattr(staging.Staging, "stage", corrupted)
    checked = {"checksums": True}
    async with workers(
        worker_config(Role.PREFILL, model, engine={"page_size": 16}, transfer=checked),
        worker_config(Role.DECODE, model, engine={"page_size": 64}, transfer=checked),
    ) as (prefill, decode):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(prompt, GREEDY, [prefill]))
        assert answer.token_ids == wanted
        assert decode.worker._transfers.num_mismatches == 1
        await wait_until_empty(prefill, decode)


async def test_a_transfer_between_two_dtypes_is_refused_and_the_decode_worker_prefills(
    model: Path, reference: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = make_prompts(seed=3)[5]
    (wanted,) = wanted_from(reference, [prompt], GREEDY)
    async with workers(
        worker_config(Role.PREFILL, model, engine={"dtype": "bfloat16", "page_size": 64}),
        worker_config(Role.DECODE, model),
    ) as (prefill, decode):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(prompt, GREEDY, [prefill]))
        await wait_until_empty(prefill, decode)
        assert answer.token_ids == wanted
        assert answer.timing is not None
        assert answer.timing.pages_moved == 0
        (refusal,) = [record.message for record in caplog.records if "failed" in record.message]
        assert "dtype is 'float32' at the receiver, 'bfloat16' at the sender" in refusal
        for server in (prefill, decode):
            assert server.worker._engine.layout.digest() in refusal


async def test_the_routers_index_matches_each_cache_by_its_own_page_size() -> None:
    prompt = [300 + number for number in range(150)]
    engine = Engine.load(EngineConfig(model=str(MODEL), num_pages=32, num_threads=1, dtype="float32"))
    salt = make_salt(engine.model.revision)
    wanted = generate(engine, prompt, GREEDY, salt, use_prefix_cache=False)
    prefill = PrefillServer(worker_config(Role.PREFILL, MODEL, engine={"page_size": 64, "dtype": "float32"}))
    decode = DecodeServer(worker_config(Role.DECODE, MODEL, engine={"prefix_caching": False, "dtype": "float32"}))
    for server in (prefill, decode):
        await server.start()
    async with running_router(prefill, decode) as router:  # type: ignore[arg-type]
        index, hashes = router.server.fleet.index, hash_pages(prompt, 64, salt)
        for cached in (0, 128):
            asked = request(token_ids=prompt, max_tokens=16, temperature=0.0, ignore_eos=True)
            messages = await collect(router.stub.Generate(asked))
            assert [token for message in messages for token in message.token_ids] == wanted
            timing = messages[-1].timing
            assert (timing.prefill_worker, timing.pages_moved, timing.cached_tokens) == ("prefill", 10, cached)
            await until(lambda: index.match(hashes) == {"prefill": (2, 2, 0)})


# Without workers: two layouts, a sender and a receiver.


class Ends:
    """Holds a sender of one layout and receivers of others."""

    def __init__(self, transport: str, source: KVLayout) -> None:
        self.settings = config(transport)
        self.layout = source
        self.pushes = Log()
        self.source = torch.randn(source.shape(NUM_PAGES))
        self.sender = TransferSender(
            self.source, source, Epoch(1), self.settings, self.pushes.on_done, self.pushes.on_failure
        )
        self.receivers: list[TransferReceiver] = []

    def receiver(self, layout: KVLayout, epoch: int) -> tuple[TransferReceiver, torch.Tensor, Log]:
        log = Log()
        pool = allocate_pool(layout.shape(NUM_PAGES), torch.float32, torch.device("cpu"))
        made = TransferReceiver(pool, layout, Epoch(epoch), self.settings, log.on_arrival, log.on_failure)
        self.receivers.append(made)
        return made, pool, log


@contextmanager
def ends(transport: str = "shm", source: KVLayout = LAYOUT) -> Iterator[Ends]:
    made = Ends(transport, source)
    try:
        yield made
    finally:
        made.sender.shutdown()
        for receiver in made.receivers:
            receiver.shutdown()


def tokens_of(pool: torch.Tensor, pages: list[PageId], num_tokens: int) -> torch.Tensor:
    """Returns the KV of the first tokens in these pages as [L, 2, K, T, H]."""
    return torch.cat([pool[page] for page in pages], dim=3)[:, :, :, :num_tokens]


@pytest.mark.parametrize("transport", ["shm", "torch", "nixl"])
def test_one_sender_serves_receivers_that_hold_half_the_heads_each(transport: str) -> None:
    """A prefill worker sends to a decode worker with two ranks and larger pages."""
    if transport == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed")
    with ends(transport) as made:
        src_pages = [PageId(page) for page in random.Random(3).sample(range(NUM_PAGES), 5)]
        wanted = tokens_of(made.source, src_pages, 70)
        for rank, heads in enumerate([(0, 2), (2, 4)]):
            receiver, pool, log = made.receiver(replace(LAYOUT, page_size=24, head_range=heads), 2 + rank)
            moved = key(rank, receiver_epoch=2 + rank)
            dst_pages = [PageId(7), PageId(0), PageId(3)]
            receiver.open(moved, dst_pages)
            plan = made.sender.open(moved, receiver.offer(PREFILL, Epoch(1)))
            assert plan.source_heads == slice(*heads)
            made.sender.push_tokens(moved, 0, range(48), src_pages[:3], dst_pages[:2])
            made.sender.push_tokens(moved, 2, range(48, 70), src_pages, dst_pages[2:])
            made.sender.finish(moved)
            made.pushes.wait(lambda moved=moved: moved in made.pushes.done)
            log.wait(lambda log=log, moved=moved: log.landed.get(moved) == {0, 1, 2})
            assert made.pushes.failed == []
            assert torch.equal(tokens_of(pool, dst_pages, 70), wanted[:, :, heads[0] : heads[1]])
            assert not pool[3, :, :, :, 22:].any()  # no token lies there
        assert made.sender.stats.num_pages == 6


def test_a_transfer_larger_than_the_staging_memory_is_staged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(LAYOUT, page_size=8)
    monkeypatch.setattr(staging, "STAGING_BYTES", 4 * target.page_bytes)
    monkeypatch.setattr("kv_transfer.send.send_queue.MAX_PUSH_BYTES", 2 * target.page_bytes)
    with ends("torch") as made:
        receiver, pool, log = made.receiver(target, 2)
        src_pages = [PageId(page) for page in reversed(range(NUM_PAGES))][:10]
        dst_pages = [PageId(page) for page in range(20)]
        keys = [key(number) for number in range(4)]
        for each in keys:
            receiver.open(each, dst_pages)
            made.sender.open(each, receiver.offer(PREFILL, Epoch(1)))
            made.sender.push_tokens(each, 0, range(160), src_pages, dst_pages)
            made.sender.finish(each)
        made.pushes.wait(lambda: set(made.pushes.done) == set(keys))
        log.wait(lambda: all(log.landed.get(each) == set(range(20)) for each in keys))
        assert torch.equal(tokens_of(pool, dst_pages, 160), tokens_of(made.source, src_pages, 160))
        (path,) = made.sender._links._paths._staged.values()
        assert path.staging is not None
        assert path.staging.num_free == path.staging.pages.num_pages == 4


def test_staged_pages_are_freed_after_an_abort_and_after_a_lost_receiver() -> None:
    with ends("torch") as made:
        receiver, _, log = made.receiver(replace(LAYOUT, page_size=64), 2)
        pages = [PageId(page) for page in range(8)]
        aborted, lost = key(1), key(2)
        for each in (aborted, lost):
            receiver.open(each, pages[:2])
            made.sender.open(each, receiver.offer(PREFILL, Epoch(1)))
            made.sender.push_tokens(each, 0, range(128), pages, pages[:2])
        made.sender.abort(aborted)
        made.pushes.wait(lambda: made.pushes.done == [aborted])
        log.wait(lambda: lost in log.landed)
        receiver.shutdown()
        made.pushes.wait(lambda: lost in made.pushes.done)
        (path,) = made.sender._links._paths._staged.values()
        assert path.staging is not None
        assert path.staging.num_free == path.staging.pages.num_pages


def test_whole_pages_are_not_pushed_to_pages_of_another_size() -> None:
    with ends() as made:
        receiver, _, _ = made.receiver(replace(LAYOUT, page_size=64), 2)
        for number, push in enumerate(
            [
                lambda each: made.sender.push(each, 0, [PageId(1)], [PageId(1)]),
                lambda each: made.sender.push_tokens(each, 0, range(16, 32), [PageId(1)] * 2, [PageId(1)]),
                lambda each: made.sender.push_tokens(each, 0, range(32), [PageId(1)] * 2, [PageId(1), PageId(2)]),
            ]
        ):
            each = key(number)
            receiver.open(each, [PageId(1)])
            made.sender.open(each, receiver.offer(PREFILL, Epoch(1)))
            push(each)
            made.pushes.wait(lambda each=each: each in made.pushes.done)
        problems = [error.message for _, error in made.pushes.failed]
        assert "whole pages cannot be pushed to a receiver of another layout" in problems[0]
        assert "range(16, 32) does not fit 1 pages of 64 tokens" in problems[1]
        assert "range(0, 32) does not fit 2 pages of 64 tokens" in problems[2]
        with pytest.raises(ValueError, match="from 1 pages of 16 tokens"):
            made.sender.push_tokens(key(0), 0, range(17), [PageId(1)], [PageId(1)])


def test_layouts_beyond_the_staging_limit_are_refused_until_one_is_unused() -> None:
    with ends() as made:
        sizes = [2, 4, 8, 32, 64]
        assert len(sizes) == MAX_STAGED_PATHS + 1
        for number, size in enumerate(sizes):
            receiver, _, _ = made.receiver(replace(LAYOUT, page_size=size), 2 + number)
            receiver.open(key(number, receiver_epoch=2 + number), [PageId(0)])
            made.sender.open(key(number, receiver_epoch=2 + number), receiver.offer(PREFILL, Epoch(1)))
        last = key(4, receiver_epoch=6)
        made.pushes.wait(lambda: last in made.pushes.done)
        assert "4 page layouts other than its own" in made.pushes.failed[0][1].message
        made.receivers[0].shutdown()  # its link ends, which frees the first layout's staging memory
        made.pushes.wait(lambda: key(0, receiver_epoch=2) in made.pushes.done)
        made.sender.open(replaced := key(5, receiver_epoch=6), made.receivers[4].offer(PREFILL, Epoch(1)))
        made.sender.push_tokens(replaced, 0, range(16), [PageId(0)], [PageId(0)])
        made.sender.finish(replaced)
        made.pushes.wait(lambda: replaced in made.pushes.done)
        assert replaced not in made.pushes.failed_keys()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_revision": "r2"}, "model_revision is 'r2' at the receiver, 'r1' at the sender"),
        ({"num_layers": 3}, "num_layers is 3 at the receiver, 2 at the sender"),
        ({"num_kv_heads": 8}, "num_kv_heads is 8 at the receiver, 4 at the sender"),
        ({"head_dim": 16}, "head_dim is 16 at the receiver, 8 at the sender"),
        ({"dtype": "float16"}, "dtype is 'float16' at the receiver, 'float32' at the sender"),
        ({"quantization": "int8"}, "quantization is 'int8' at the receiver, 'none' at the sender"),
        ({"hash_version": 9}, "hash_version is 9 at the receiver, 1 at the sender"),
    ],
)
def test_an_incompatible_offer_is_refused_by_field(changes: dict[str, object], problem: str) -> None:
    with ends() as made:
        receiver, _, _ = made.receiver(LAYOUT, 2)
        offer = parse_offer(receiver.offer(PREFILL, Epoch(1)))
        other = replace(LAYOUT, page_size=64, **changes)  # type: ignore[arg-type]
        with pytest.raises(TransferRefused, match=problem) as refused:
            made.sender.open(key(1), replace(offer, layout=other).encode())
        assert LAYOUT.digest() in refused.value.message
        assert other.digest() in refused.value.message
        assert not made.sender.is_open(key(1))


def test_hashes_of_two_page_sizes_are_disjoint() -> None:
    """A router indexes workers of both page sizes together."""
    tokens = list(range(2, 260))
    assert not set(hash_pages(tokens, 16, SALT)) & set(hash_pages(tokens, 64, SALT))
