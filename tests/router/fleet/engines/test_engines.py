"""Tests a router in front of other engines: streams, prefixes by events, refusals, losses, and pairs by
kv_transfer_params."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from pydantic import ValidationError

from penstock.config import RouterConfig
from penstock.errors import ConfigError, InvalidInput, Unavailable
from penstock.kv.block_events import BlocksStored, encode_batch
from penstock.kv.page_hash import hash_pages
from router.fleet.engines import engine_follower, engine_http, engine_link
from tests.router.api.test_grpc_service import collect, failure, finish_of, read_tokens, request
from tests.support.router.engine_double import BLOCK, EngineDouble, expected, running_engines
from tests.support.router.router_fakes import RunningRouter, running_router, until

PROMPT = [20 + i % 400 for i in range(5 * BLOCK)]


@contextlib.asynccontextmanager
async def routed(
    *engines: EngineDouble, roles: tuple[str, ...] = (), **settings: object
) -> AsyncIterator[RunningRouter]:
    async with running_engines(*engines):
        named = {
            engine.name: engine.settings(role=role, remote_from_tokens=BLOCK)
            for engine, role in zip(engines, roles or ["both"] * len(engines), strict=True)
        }
        async with running_router(engines=named, wait=False, **settings) as router:
            await until(lambda: sum(worker.takes_work for worker in router.server.fleet.followers) == len(engines))
            yield router


def tokens(messages: list) -> list[int]:
    return [token for message in messages for token in message.token_ids]


async def ask(router: RunningRouter, prompt: list[int], **sampling: object) -> list:
    return await collect(router.stub.Generate(request(token_ids=prompt, temperature=0.0, **sampling)))


def held(router: RunningRouter, name: str) -> int:
    return router.server.fleet.index.pages_of(name)  # type: ignore[arg-type]


async def test_streams_equal_the_engines_own() -> None:
    engine = EngineDouble(model="penstock-tiny")
    async with routed(engine) as router:
        messages = await ask(router, PROMPT, max_tokens=9, logprobs=1)
        assert tokens(messages) == expected(PROMPT, 9)
        assert finish_of(messages[-1]) == "length"
        logprobs = [each for message in messages for each in message.logprobs]
        assert [each.token_id for each in logprobs] == expected(PROMPT, 9)
        assert {(top.token_id, top.logprob) for each in logprobs for top in each.top} >= {(3, -2.0)}
        body = engine.bodies[0]
        assert (body["prompt"], body["max_tokens"], body["temperature"]) == (PROMPT, 9, 0.0)
        assert "cache_salt" not in body


async def test_a_prefix_is_sent_to_the_engine_that_holds_it() -> None:
    engines = [EngineDouble(f"engine-{number}") for number in range(3)]
    async with routed(*engines) as router:
        other = [token + 1 for token in PROMPT]
        await engines[1]._cache(PROMPT, "")  # computed for another client
        await engines[2]._cache(other, "")
        await until(lambda: held(router, "engine-1") == held(router, "engine-2") == 5)
        for _ in range(4):
            await ask(router, [*PROMPT, 30, 31], max_tokens=2)
            await ask(router, [*other, 30, 31], max_tokens=2)
        assert [len(engine.bodies) for engine in engines] == [0, 4, 4]
        await engines[1].evict_all()
        await until(lambda: held(router, "engine-1") == 0)


async def test_tenants_share_no_prefix_at_an_engine() -> None:
    engine = EngineDouble()
    async with routed(engine) as router:
        for salt in ("", "mine", "mine"):
            wanted = request(token_ids=PROMPT, temperature=0.0, max_tokens=2)
            wanted.cache_salt = salt
            messages = await collect(router.stub.Generate(wanted))
            await until(lambda: held(router, "engine") >= 5)
        assert messages[-1].timing.cached_tokens == 5 * BLOCK
        salts = [body.get("cache_salt") for body in engine.bodies]
        assert salts[0] is None
        assert salts[1] == salts[2] != "mine"
        await until(lambda: held(router, "engine") == 10)
        follower = router.server.fleet.followers[0]
        index, root = router.server.fleet.index, bytes.fromhex(str(salts[1]))
        assert index.match(hash_pages(PROMPT, BLOCK, root))[follower.worker_id].num_pages == 5


async def test_a_lost_engine_leaves_no_gap_in_the_stream() -> None:
    broken, whole = EngineDouble("engine-0", break_after=3), EngineDouble("engine-1")
    async with routed(broken, whole, policy="round-robin") as router:
        for _ in range(2):  # one of the two starts at the broken engine
            messages = await ask(router, PROMPT, max_tokens=8)
            assert tokens(messages) == expected(PROMPT, 8)
        resumed = [body for body in whole.bodies if len(body["prompt"]) > len(PROMPT)]  # type: ignore[arg-type]
        assert {(len(body["prompt"]), body["max_tokens"]) for body in resumed} == {(len(PROMPT) + 3, 5)}  # type: ignore[arg-type]


async def test_a_dead_holder_of_a_prefix_gets_no_more_requests() -> None:
    holder, other = EngineDouble("engine-0", pause_at=2), EngineDouble("engine-1")
    async with routed(holder, other) as router:
        await holder._cache(PROMPT, "")
        await until(lambda: held(router, "engine-0") == 5)
        call = router.stub.Generate(request(token_ids=[*PROMPT, 30], temperature=0.0, max_tokens=6))
        messages = await read_tokens(call, 2)
        await holder.stop()  # it refuses connections from now on
        messages += await collect(call)
        assert tokens(messages) == expected([*PROMPT, 30], 6)
        assert messages[-1].timing.decode_worker == "engine-1"
        await holder.start()


async def test_an_engine_that_refuses_is_passed_over() -> None:
    busy, free = EngineDouble("engine-0", refuse=503), EngineDouble("engine-1")
    async with routed(busy, free, policy="round-robin") as router:
        for _ in range(2):
            assert tokens(await ask(router, PROMPT, max_tokens=3)) == expected(PROMPT, 3)
        assert busy.bodies


async def test_a_permanent_refusal_reaches_the_client() -> None:
    engine = EngineDouble(refuse=400)
    async with routed(engine) as router:
        error = await failure(router.stub.Generate(request(token_ids=PROMPT)))
        assert isinstance(error, InvalidInput)
        assert "engine engine refused it: not now" in error.message
        error = await failure(router.stub.Generate(request(token_ids=PROMPT, prompt_logprobs=1)))
        assert "prompt_logprobs" in error.message
        assert "another engine" in error.message


async def test_a_refusal_with_unencodable_text_ends_the_request() -> None:
    engine = EngineDouble(refuse=400, refusal="half a character: \ud800")
    async with routed(engine) as router:
        error = await failure(router.stub.Generate(request(token_ids=PROMPT)))
        assert "half a character: ?" in error.message


async def test_an_answer_is_complete_at_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_USAGE_S", 0.2)
    for trouble in ("never ends", "breaks at its end", "does not say that it ends", "goes on"):
        engine = EngineDouble(trouble=trouble)
        async with routed(engine) as router:
            messages = await ask(router, PROMPT, max_tokens=4)
            assert tokens(messages) == expected(PROMPT, 4)
            assert finish_of(messages[-1]) == "length"
            assert len(engine.bodies) == 1
            await until(lambda: engine.num_running == 0)  # noqa: B023


async def test_compressed_answers_are_not_decompressed() -> None:
    engine, other = EngineDouble("engine-0", trouble="is compressed"), EngineDouble("engine-1")
    async with routed(engine, other, policy="round-robin") as router:
        for _ in range(2):
            assert tokens(await ask(router, PROMPT, max_tokens=4)) == expected(PROMPT, 4)
        assert engine.bodies


async def test_a_client_that_leaves_frees_the_engine() -> None:
    engine = EngineDouble(pause_at=2)
    async with routed(engine) as router:
        call = router.stub.Generate(request(token_ids=PROMPT, temperature=0.0, max_tokens=9))
        await read_tokens(call, 2)
        call.cancel()
        await until(lambda: engine.num_cancelled == 1 and engine.num_running == 0)
        link = router.server.fleet.followers[0].link
        assert link is not None
        await until(lambda: link.num_streams == 0)  # type: ignore[attr-defined]


async def test_a_deadline_ends_a_request_at_the_engine() -> None:
    engine = EngineDouble(pause_at=0)
    async with routed(engine) as router:
        error = await failure(router.stub.Generate(request(token_ids=PROMPT), timeout=1.0))
        assert error.reason == "DEADLINE_EXCEEDED"
        await until(lambda: engine.num_cancelled == 1)


async def test_a_restarted_engine_is_followed_again() -> None:
    engine = EngineDouble()
    async with routed(engine) as router:
        await ask(router, PROMPT, max_tokens=2)
        await until(lambda: held(router, "engine") == 5)
        before = router.server.fleet.followers[0].epoch
        await engine.stop()
        engine.cached.clear()
        engine.sent.clear()
        engine.started_s += 100
        await engine.start()
        await until(lambda: router.server.fleet.followers[0].takes_work)
        await until(lambda: router.server.fleet.followers[0].epoch != before)
        await until(lambda: held(router, "engine") == 0)
        await until(lambda: router.server.fleet.followers[0].takes_work)
        assert tokens(await ask(router, PROMPT, max_tokens=2)) == expected(PROMPT, 2)
        await until(lambda: held(router, "engine") == 5)


async def test_lost_events_are_replayed_or_clear_the_index() -> None:
    engine = EngineDouble()
    stored = [BlocksStored((number,), None, tuple(range(number, number + BLOCK)), BLOCK) for number in range(6)]
    async with routed(engine) as router:
        await engine.publish(stored[0])
        await until(lambda: held(router, "engine") == 1)
        await engine.publish_payload(encode_batch(0.0, [stored[1]]), live=False)  # lost in transit
        await engine.publish(stored[2])
        await until(lambda: held(router, "engine") == 3)
        await engine.publish_payload(b"\xc1")  # unreadable, so its content is unknown
        await until(lambda: held(router, "engine") == 0)
        await engine.publish(stored[4])
        await until(lambda: held(router, "engine") == 1)
        losses = router.server.fleet.followers[0]
        await until(lambda: losses.load.metrics["kv_event_losses"] == 1)


async def test_pairs_hand_over_by_kv_transfer_params() -> None:
    prefill, decode = EngineDouble("prefill-0"), EngineDouble("decode-0")
    decode.peers.append(prefill)
    async with routed(prefill, decode, roles=("prefill", "decode")) as router:
        messages = await ask(router, PROMPT, max_tokens=4)
        assert tokens(messages) == expected(PROMPT, 4)
        first, second = prefill.bodies[0], decode.bodies[0]
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert first["kv_transfer_params"]["do_remote_decode"] is True  # type: ignore[index]
        assert second["kv_transfer_params"]["remote_request_id"] == "prefill-0/0"  # type: ignore[index]
        assert messages[-1].timing.prefill_worker == "prefill-0"
        assert messages[-1].timing.prefill_cached_tokens == 0
        await ask(router, PROMPT[: BLOCK - 1], max_tokens=2)  # too short to be worth a transfer
        assert len(prefill.bodies) == 1
        prefill.refuse = 500
        assert tokens(await ask(router, [*PROMPT, 25], max_tokens=4)) == expected([*PROMPT, 25], 4)
        assert "kv_transfer_params" not in decode.bodies[-1]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_follower, "_SILENCE_S", 0.8)
    monkeypatch.setattr(engine_http, "_GET_TIMEOUT_S", 0.4)


async def test_a_frozen_engine_loses_its_requests(impatient: None) -> None:
    engines = [EngineDouble(f"engine-{number}", pause_at=2) for number in range(2)]
    async with routed(*engines) as router:
        call = router.stub.Generate(request(token_ids=PROMPT, temperature=0.0, max_tokens=6))
        messages = await read_tokens(call, 2)
        frozen, other = engines if engines[0].bodies else engines[::-1]
        frozen.is_frozen, other.pause_at = True, None
        messages += await collect(call)
        assert tokens(messages) == expected(PROMPT, 6)
        assert messages[-1].timing.decode_worker == other.name
        assert len(other.bodies[0]["prompt"]) == len(PROMPT) + 2  # type: ignore[arg-type]


async def test_a_frozen_prefill_engine_is_given_up(impatient: None) -> None:
    prefill, decode = EngineDouble("prefill-0"), EngineDouble("decode-0")
    async with routed(prefill, decode, roles=("prefill", "decode")) as router:
        prefill.is_frozen = True
        assert tokens(await ask(router, PROMPT, max_tokens=4)) == expected(PROMPT, 4)
        assert len(prefill.bodies) == 1
        assert "kv_transfer_params" not in decode.bodies[0]


@contextlib.contextmanager
def held_ports(settings: dict[str, object]) -> Iterator[None]:
    """Keeps the system from giving a stopped engine's ports to other sockets. The engine itself can bind them again."""
    with contextlib.ExitStack() as stack:
        for url in settings.values():
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", int(str(url).rsplit(":", 1)[1])))
        yield


async def test_a_router_waits_for_an_engine() -> None:
    engine = EngineDouble()
    await engine.start()
    settings = engine.settings()
    await engine.stop()
    with held_ports(settings):
        async with running_router(engines={"engine": settings}, wait=False) as router:
            error = await failure(router.stub.Generate(request(token_ids=PROMPT), timeout=0.5))
            assert isinstance(error, Unavailable) or error.reason == "DEADLINE_EXCEEDED"
            await engine.start()
            try:
                await until(lambda: router.server.fleet.followers[0].takes_work)
                assert tokens(await ask(router, PROMPT, max_tokens=3)) == expected(PROMPT, 3)
            finally:
                await engine.stop()


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ({"a": {"url": "http://h:1", "role": "prefill"}}, "engines have the roles prefill; give each `both`"),
        (
            {"a": {"url": "http://h:1", "role": "decode"}, "b": {"url": "http://h:2"}},
            "engines have the roles both, decode",
        ),
        ({"a": {"url": "http://h:1"}, "b": {"url": "http://h:1/"}}, "engines holds one url twice"),
        ({"a": {"url": "h:1"}}, "engines.a.url"),
        ({"a": {"url": "http://user:secret@h:1"}}, "engines.a.url"),
        ({"a b": {"url": "http://h:1"}}, "engines.a b"),
    ],
)
def test_bad_settings_are_refused_by_key(engines: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RouterConfig.model_validate({"model": "m", "engines": engines})


async def test_engines_and_workers_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"engines = .*give exactly one of them"):
        async with running_router(engines={"a": {"url": "http://127.0.0.1:9"}}, workers=("127.0.0.1:1",), wait=False):
            await asyncio.sleep(0)
