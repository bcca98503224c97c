"""Tests KV transfers between workers with different numbers of ranks: tokens equal those of a single process.

Ranks are threads here; `tests/system/test_tensor_parallel_faults.py` uses processes.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.server import DecodeServer
from engine.cache.kv_layout import KVLayout
from engine.engine import Engine
from engine.generate import generate
from engine.parallel.shard import Shard, shard_layouts
from engine.parallel.worker_rank import WorkerRank
from kv_transfer.layout.checksum import page_checksums, row_checksums
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import page_rows
from kv_transfer.ranks.head_routes import join_offers, plan_head_routes, split_offer
from kv_transfer.ranks.rank_service import RankTransfers
from kv_transfer.session.handshake import parse_offer
from penstock.config import EngineConfig
from penstock.errors import TransferError
from penstock.rpc.server import make_channel
from penstock.types import PageId, Role, SamplingParams, TransferId, TransferKey
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from tests.decode_worker.migrate.test_migration import Router
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, SALT, TIMEOUT_S, caller, wait_until_empty, worker_config, workers
from tests.worker.test_handover import ask, cached_tokens, hand_over

PROMPT = [3 + (7 * place) % 290 for place in range(75)]
SEEDED = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
VERIFIED = {"checksums": True}
LAYOUT = KVLayout(num_layers=3, num_kv_heads=12, page_size=4, head_dim=6, dtype="float16", model_revision="r")


class Expected(Protocol):
    """Returns the tokens that a single process generates."""

    def __call__(self, sampling: SamplingParams, kv_dtype: str = "auto") -> list[int]: ...


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.shell.launch_ranks", launch_threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    @functools.cache
    def alone(kv_dtype: str) -> Engine:
        settings = {"model": str(model), "num_pages": 64, "num_threads": 1, "kv_dtype": kv_dtype}
        return Engine.load(EngineConfig.model_validate(settings))

    return lambda sampling, kv_dtype="auto": generate(alone(kv_dtype), PROMPT, sampling, SALT, use_prefix_cache=False)


@given(
    num_kv_heads=st.sampled_from([1, 2, 4, 6, 8, 12]),
    num_senders=st.sampled_from([1, 2, 3, 4, 6, 8]),
    num_receivers=st.sampled_from([1, 2, 3, 4, 6, 8]),
)
def test_every_head_of_every_receiving_rank_is_sent_once(
    num_kv_heads: int, num_senders: int, num_receivers: int
) -> None:
    def shares(num_ranks: int) -> bool:
        return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0

    if not shares(num_senders) or not shares(num_receivers):
        return
    routes = plan_head_routes(num_kv_heads, num_senders, num_receivers)
    for rank in range(num_receivers):
        heads = [head for route in routes if route.receiver == rank for head in route.heads]
        assert heads == list(Shard(rank, num_receivers).kv_heads(num_kv_heads))
    for route in routes:
        assert set(route.heads) <= set(Shard(route.sender, num_senders).kv_heads(num_kv_heads))
    assert len({(route.sender, route.receiver) for route in routes}) == len(routes)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("page_heads", "heads"), [((0, 12), (4, 8)), ((6, 12), (9, 12)), ((3, 9), (4, 9)), ((0, 4), (0, 4))]
)
def test_rows_of_some_heads_equal_a_page_of_those_heads(
    page_heads: tuple[int, int], heads: tuple[int, int], kv_dtype: str
) -> None:
    """Selects rows from pages of all heads and compares them with pages of some heads."""
    page = replace(LAYOUT, head_range=page_heads, kv_dtype=kv_dtype)
    part = replace(LAYOUT, head_range=heads, kv_dtype=kv_dtype)
    rows = page_rows(page, range(*heads))
    numbers = torch.arange(12, dtype=torch.uint8)  # each head's bytes are its number
    pages, parts = (_pool(each, numbers) for each in (page, part))
    found = PageBuffer(pages).in_rows(rows.num_in_page).rows_PW.view(torch.uint8).view(2, rows.num_in_page, -1)
    assert torch.equal(found[:, list(rows.places)].flatten(1), parts)
    pages_of = [PageId(0), PageId(1)]
    assert row_checksums(pages, pages_of, rows) == page_checksums(parts, pages_of)


def _pool(layout: KVLayout, numbers: torch.Tensor) -> torch.Tensor:
    """Returns two pages of bytes [P, B]; each byte is its head's number, offset by layer and by K or V."""
    heads, size = len(layout.heads), layout.page_size
    widths = [layout.head_dim, 4] if layout.is_quantized else [layout.head_dim * 2]
    chunks: list[torch.Tensor] = []
    for layer in layout.layers:
        for width in widths:
            for half in range(2):
                base = numbers[list(layout.heads)] + 16 * (2 * layer + half)
                chunks.append(base[:, None].expand(heads, size * width).flatten())
    page = torch.cat(chunks)
    assert len(page) == layout.page_bytes
    return torch.stack((page, page + 1))


def test_a_malformed_offer_of_several_ranks_is_refused() -> None:
    assert split_offer(join_offers(2, 1, [b"one", b"two"])) == (2, 1, [b"one", b"two"])
    assert join_offers(1, 1, [b"one"]) == b"one"
    for data in (b"\xc1", join_offers(0, 1, []), join_offers(1, 65, [])):
        with pytest.raises(TransferError, match="offer"):
            split_offer(data)
    with pytest.raises(TransferError, match="offer"):
        parse_offer(join_offers(2, 1, [b"one"]))  # it must not be taken for the offer of a single rank
    assert [shard.heads for shard in shard_layouts(LAYOUT, 3)] == [range(0, 4), range(4, 8), range(8, 12)]


def test_a_call_to_a_closed_end_does_not_end_the_rank() -> None:
    """A stopping worker closes its sender while its step loop still runs, possibly in the middle of a push."""
    extension = RankTransfers(cast(WorkerRank, None)).extension
    for handlers in (extension.in_turn["end"], extension.at_once["end_at_once"]):
        assert handlers([7, "push_tokens", []]) is None


HANDOFFS = [
    ((2, 16), (1, 16), {"transport": "torch"}, "auto"),
    ((2, 8), (1, 16), {}, "auto"),
    ((1, 16), (2, 8), {}, "auto"),
    ((2, 16), (2, 32), {"checksums": True}, "auto"),
    ((4, 16), (2, 16), {"checksums": True}, "auto"),
    ((2, 16), (1, 16), {"checksums": True}, "int8"),
    ((1, 8), (2, 16), {"checksums": True}, "int8"),
    ((2, 8), (1, 16), {}, "fp8"),
    ((1, 16), (2, 16), {}, "fp8"),
]


@pytest.mark.parametrize(("prefill", "decode", "transfer", "kv_dtype"), HANDOFFS)
async def test_prefilled_prompts_transfer_between_different_numbers_of_ranks(
    prefill: tuple[int, int],
    decode: tuple[int, int],
    transfer: dict[str, object],
    kv_dtype: str,
    model: Path,
    expected: Expected,
) -> None:
    """`prefill` and `decode` are (ranks, page size)."""
    ends = [
        worker_config(
            role,
            model,
            engine={"tensor_parallel": ranks, "page_size": page_size, "kv_dtype": kv_dtype},
            prefill={"max_batch_tokens": 24},
            transfer=transfer,
        )
        for role, (ranks, page_size) in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    ]
    async with workers(*ends) as (source, target):
        assert isinstance(source, PrefillServer)
        assert isinstance(target, DecodeServer)
        async with caller(target) as calls:
            numbers = [(sampling, calls.submit(PROMPT, sampling, [source])) for sampling in (GREEDY, SEEDED)]
            num_migrated = 0
            for sampling, number in numbers:
                answer = await calls.answer(number)
                assert answer.error is None
                assert answer.timing is not None
                num_migrated += answer.timing.pages_moved
                assert answer.token_ids == expected(sampling, kv_dtype)
            assert num_migrated >= len(PROMPT) // decode[1]
        await wait_until_empty(source, target)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
async def test_every_rank_forgets_a_peer_and_disconnects_it(ranks: tuple[int, int], model: Path) -> None:
    ends = [
        worker_config(role, model, engine={"tensor_parallel": count})
        for role, count in zip((Role.PREFILL, Role.DECODE), ranks, strict=True)
    ]
    async with workers(*ends) as (source, target):
        assert isinstance(source, PrefillServer)
        assert isinstance(target, DecodeServer)
        receiver = target.shell.open_receiver()
        async with caller(target) as calls:
            answer = await calls.answer(calls.submit(PROMPT, GREEDY, [source]))
            assert answer.timing is not None
            assert answer.timing.pages_moved > 0
            assert not await asyncio.to_thread(receiver.cut_off, source.epoch)
            await asyncio.to_thread(receiver.forget, source.epoch)
            unknown = TransferKey(TransferId("late"), source.epoch, target.epoch)
            with pytest.raises(TransferError, match="its sender is not known here, or was forgotten"):
                receiver.open(unknown, [PageId(0)])
            async with asyncio.timeout(TIMEOUT_S):
                while not await asyncio.to_thread(receiver.cut_off, source.epoch):  # noqa: ASYNC110 - no event says it
                    await asyncio.sleep(0.01)
            # The peer is alive after all: its next pages use the transport over which it cannot write on its own.
            other = [token + 1 for token in PROMPT]
            again = await calls.answer(calls.submit(other, GREEDY, [source]))
            assert again.timing is not None
            assert again.timing.prefill_worker == "prefill"
            assert again.timing.pages_moved > 0
            assert await asyncio.to_thread(receiver.cut_off, source.epoch)
        await wait_until_empty(source, target)


@pytest.mark.parametrize(("source_dtype", "target_dtype"), [("auto", "fp8"), ("int8", "auto")])
async def test_kv_dtypes_are_converted_equally_for_every_number_of_ranks(
    source_dtype: str, target_dtype: str, model: Path
) -> None:
    """The tokens equal those of two workers with one rank each and the same two dtypes."""
    answers: dict[tuple[int, int], list[list[int]]] = {}
    for ranks in ((1, 1), (2, 1), (1, 2)):
        source, target = (
            worker_config(role, model, engine={"tensor_parallel": count, "kv_dtype": kv_dtype}, transfer=VERIFIED)
            for role, count, kv_dtype in zip(
                (Role.PREFILL, Role.DECODE), ranks, (source_dtype, target_dtype), strict=True
            )
        )
        async with workers(source, target) as (prefill, decode):
            assert isinstance(prefill, PrefillServer)
            assert isinstance(decode, DecodeServer)
            async with caller(decode) as calls:
                answers[ranks] = []
                for sampling in (GREEDY, SEEDED):
                    answer = await calls.answer(calls.submit(PROMPT, sampling, [prefill]))
                    assert answer.error is None
                    assert answer.timing is not None
                    assert answer.timing.prefill_worker == "prefill"
                    answers[ranks].append(answer.token_ids)
            await wait_until_empty(prefill, decode)
    assert answers[2, 1] == answers[1, 1]
    assert answers[1, 2] == answers[1, 1]


@pytest.mark.parametrize(
    ("leaving_ranks", "staying_ranks", "kv_dtype"), [(2, 1, "auto"), (1, 2, "int8"), (4, 2, "fp8")]
)
async def test_cached_pages_are_handed_over_between_different_numbers_of_ranks(
    leaving_ranks: int, staying_ranks: int, kv_dtype: str, model: Path, expected: Expected
) -> None:
    async with workers(
        *(
            worker_config(
                Role.DECODE,
                model,
                name,
                engine={"tensor_parallel": ranks, "kv_dtype": kv_dtype},
                decode={"placement": "local"},
            )
            for name, ranks in (("leaving", leaving_ranks), ("staying", staying_ranks))
        )
    ) as (leaving, staying):
        assert isinstance(leaving, DecodeServer)
        assert isinstance(staying, DecodeServer)
        await ask(leaving, PROMPT)
        response = await hand_over(leaving, staying)
        assert not response.problems
        assert response.num_pages == staying.shell.intake.num_received >= len(PROMPT) // 16
        answer = await ask(staying, PROMPT)
        assert cached_tokens(answer) == (len(PROMPT) - 1) // 16 * 16
        assert answer.token_ids == expected(GREEDY, kv_dtype)
        await wait_until_empty(leaving, staying)


async def test_running_sequences_migrate_between_different_numbers_of_ranks_and_back(
    model: Path, expected: Expected
) -> None:
    long = replace(SEEDED, max_tokens=400)  # runs until both migrations are done, also on a slow machine
    local = {"placement": "local"}
    async with workers(
        worker_config(Role.DECODE, model, "split", engine={"tensor_parallel": 2}, decode=local),
        worker_config(Role.DECODE, model, "alone", engine={"page_size": 8}, decode=local),
    ) as (split, alone):
        assert isinstance(split, DecodeServer)
        assert isinstance(alone, DecodeServer)
        async with caller(split) as to_split, caller(alone) as to_alone:
            router = Router({split.epoch: to_split, alone.epoch: to_alone})
            streaming = asyncio.create_task(router.stream(split, PROMPT, long))
            for source, target in ((split, alone), (alone, split)):
                moved = []
                while not moved and not streaming.done():
                    answer = await _move(source, target)
                    moved = list(answer.migrated)
                assert moved
            seen = await streaming
        assert seen.error is None
        assert seen.num_migrations == 2
        assert seen.token_ids == expected(long)
        await wait_until_empty(split, alone)


async def _move(source: DecodeServer, target: DecodeServer) -> worker_pb2.MigrateResponse:
    channel = make_channel(source.address)
    try:
        return await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(
            worker_pb2.MigrateRequest(worker_id="target", epoch=target.epoch, address=target.address)
        )
    finally:
        await channel.close()


async def test_a_worker_of_two_ranks_flips_its_role(model: Path, expected: Expected) -> None:
    """The ranks keep their weights and pages and then receive transfers instead of sending them."""
    first = PrefillServer(worker_config(Role.PREFILL, model, engine={"tensor_parallel": 2}))
    await first.start()
    assert first.replica is not None
    try:
        await first.stop()
        split = {"tensor_parallel": 2}
        second = DecodeServer(worker_config(Role.DECODE, model, "changed", engine=split), first.replica)
        await second.start()
        try:
            async with workers(worker_config(Role.PREFILL, model)) as (source,), caller(second) as calls:
                assert isinstance(source, PrefillServer)
                answer = await calls.answer(calls.submit(PROMPT, SEEDED, [source]))
                assert answer.error is None
                assert answer.timing is not None
                assert answer.timing.pages_moved > 0
                assert answer.token_ids == expected(SEEDED)
        finally:
            await second.stop()
    finally:
        first.replica.engine.close()
