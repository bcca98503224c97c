"""Tests KV transfers of pages with two parts, of which only the last ones of a sequence move both.

The tokens equal those of a single process whose pages are whole.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig, WorkerConfig
from penstock.errors import ConfigError
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from tests.decode_worker.migrate.test_migration import Router
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, SALT, caller, wait_until_empty, worker_config, workers
from tests.worker.test_handover import ask, hand_over

PROMPT = [3 + (7 * place) % 290 for place in range(75)]
SEEDED = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
PARTS = {"num_pages": 128, "page_size": 8, "window_share": 0.3}

Expected = Callable[[SamplingParams, str], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gemma3_text", tmp_path_factory.mktemp("gemma3"), sliding_window=20)


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    @functools.cache
    def alone(kv_dtype: str) -> Engine:
        settings = {"model": str(model), "num_pages": 64, "num_threads": 1, "kv_dtype": kv_dtype}
        return Engine.load(EngineConfig.model_validate(settings))

    return lambda sampling, kv_dtype: generate(alone(kv_dtype), PROMPT, sampling, SALT, use_prefix_cache=False)


@pytest.mark.parametrize(
    ("transport", "kv_dtype"), [("shm", "auto"), ("torch", "auto"), ("nixl", "auto"), ("shm", "int8"), ("torch", "fp8")]
)
async def test_prefilled_prompts_arrive_with_the_last_windows(
    transport: str, kv_dtype: str, model: Path, expected: Expected
) -> None:
    source, target = (
        worker_config(
            role,
            model,
            engine=PARTS | {"kv_dtype": kv_dtype},
            prefill={"max_batch_tokens": 24},
            transfer={"transport": transport, "checksums": True},
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    async with workers(source, target) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        async with caller(decode) as calls:
            for sampling in (GREEDY, SEEDED):
                answer = await calls.answer(calls.submit(PROMPT, sampling, [prefill]))
                assert answer.error is None
                assert answer.timing is not None
                assert answer.timing.prefill_worker == "prefill"
                assert answer.token_ids == expected(sampling, kv_dtype)
        await wait_until_empty(prefill, decode)
        for server in (prefill, decode):
            parts = server.shell._engine.pool.parts
            assert parts is not None
            assert parts.num_held == 0


async def test_a_running_sequence_migrates_there_and_back(model: Path, expected: Expected) -> None:
    long = replace(SEEDED, max_tokens=400)  # runs until both migrations are done, also on a slow machine
    local = {"placement": "local"}
    async with workers(
        *(worker_config(Role.DECODE, model, name, engine=PARTS, decode=local) for name in ("one", "two"))
    ) as (one, two):
        assert isinstance(one, DecodeServer)
        assert isinstance(two, DecodeServer)
        async with caller(one) as to_one, caller(two) as to_two:
            router = Router({one.epoch: to_one, two.epoch: to_two})
            streaming = asyncio.create_task(router.stream(one, PROMPT, long))
            for source, target in ((one, two), (two, one)):
                moved: list[object] = []
                while not moved and not streaming.done():
                    channel = make_channel(source.address)
                    try:
                        stub = worker_pb2_grpc.DecodeWorkerStub(channel)
                        request = worker_pb2.MigrateRequest(
                            worker_id="target", epoch=target.epoch, address=target.address
                        )
                        moved = list((await stub.Migrate(request)).migrated)
                    finally:
                        await channel.close()
                assert moved
            seen = await streaming
        assert seen.error is None
        assert seen.num_migrations == 2
        assert seen.token_ids == expected(long, "auto")
        await wait_until_empty(one, two)


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"window_share": 1.0}, "one end keeps the KV of windowed layers apart, the other does not"),
        ({"page_size": 16}, "cannot be converted; give both the same engine.page_size"),
    ],
)
async def test_pages_that_do_not_fit_are_refused_by_name_and_the_prompt_is_computed_here(
    engine: dict[str, object], problem: str, model: Path, expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    source = worker_config(Role.PREFILL, model, engine=PARTS | engine)
    target = worker_config(Role.DECODE, model, engine=PARTS)
    async with workers(source, target) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        async with caller(decode) as calls:
            answer = await calls.answer(calls.submit(PROMPT, GREEDY, [prefill]))
        assert answer.error is None
        assert answer.timing is not None
        assert answer.timing.prefill_worker == "decode"
        assert answer.token_ids == expected(GREEDY, "auto")
        await wait_until_empty(prefill, decode)
    assert problem in caplog.text


async def test_cached_pages_are_not_handed_over(model: Path) -> None:
    local = {"placement": "local"}
    async with workers(
        *(worker_config(Role.DECODE, model, name, engine=PARTS, decode=local) for name in ("leaving", "staying"))
    ) as (leaving, staying):
        assert isinstance(leaving, DecodeServer)
        assert isinstance(staying, DecodeServer)
        await ask(leaving, PROMPT)
        assert not leaving.shell.description.pulls
        assert (await hand_over(leaving, staying)).num_pages == 0
        await wait_until_empty(leaving, staying)


async def test_a_worker_with_too_few_slots_for_one_prompt_does_not_start(model: Path) -> None:
    config = worker_config(Role.DECODE, model, engine=PARTS | {"window_share": 0.1})
    with pytest.raises(ConfigError, match=r"13 of 128 pages have room for windowed layers, but .* needs \d+; give a"):
        await DecodeServer(config).start()


@pytest.mark.parametrize("name", ["keeper", "kv_store"])
def test_what_keeps_whole_pages_is_refused_by_name(name: str, model: Path) -> None:
    config = worker_config(Role.DECODE, model, engine=PARTS).model_dump()
    others = {"keeper": {}, "kv_store": {"url": "file:///tmp"}}
    with pytest.raises(ValidationError, match=rf"{name} keeps whole pages, but engine\.window_share = 0\.3"):
        WorkerConfig.model_validate(config | {name: others[name]})
