"""Tests workers over gRPC in this process: fallbacks, cancellation at every phase, limits, health, reflection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded
from penstock.kv.events import decode_events
from penstock.kv.page_hash import hash_pages
from penstock.rpc.server import GrpcServer, make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import (
    GREEDY,
    SALT,
    TIMEOUT_S,
    Caller,
    caller,
    until,
    wait_until_empty,
    worker_config,
    workers,
)

LONG = replace(GREEDY, max_tokens=200)
ENDLESS = replace(GREEDY, max_tokens=7000)  # runs for seconds on the fastest machine; no test waits for its end
ROOMY = {"num_pages": 3000}  # room for six such answers
PROMPT = [(5 * i) % 300 + 2 for i in range(200)]
NOBODY = worker_pb2.PrefillCandidate(worker_id="gone", epoch=1, address="127.0.0.1:9")
Pair = tuple[PrefillServer, DecodeServer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    engine = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))
    return generate(engine, PROMPT, LONG, SALT)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@contextlib.asynccontextmanager
async def running_pair(model: Path, engine: dict[str, object]) -> AsyncIterator[Pair]:
    """Runs a prefill worker that takes 25 steps for the prompt, and a decode worker."""
    async with workers(
        worker_config(Role.PREFILL, model, engine=engine, prefill={"max_batch_tokens": 8}),
        worker_config(Role.DECODE, model, engine=engine),
    ) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        yield prefill, decode


@pytest.fixture
async def pair(model: Path) -> AsyncIterator[Pair]:
    async with running_pair(model, {}) as made:
        yield made


@pytest.fixture
async def long_pair(long_model: Path) -> AsyncIterator[Pair]:
    """Runs workers with a context in which no `ENDLESS` answer ends before the test ends it."""
    async with running_pair(long_model, ROOMY) as made:
        yield made


async def test_a_dead_candidate_loses_no_token(pair: Pair, wanted: list[int]) -> None:
    prefill, decode = pair
    async with caller(decode) as router:
        first = await router.answer(router.submit(PROMPT, GREEDY, [NOBODY, prefill]))
        assert first.token_ids == wanted[:16]
        assert first.timing is not None
        assert first.timing.prefill_worker == "prefill"
        other = [token + 1 for token in PROMPT]
        alone = await router.answer(router.submit(other, GREEDY, [NOBODY]))
        assert alone.timing is not None
        assert (alone.timing.prefill_worker, alone.timing.pages_moved) == ("decode", 0)
    await wait_until_empty(prefill, decode)


async def test_the_outcome_of_each_prefill_attempt_reaches_the_router_at_once(pair: Pair) -> None:
    prefill, decode = pair
    async with caller(decode) as router:
        await router.answer(router.submit(PROMPT, GREEDY, [NOBODY, prefill]))
        reported = [delta.prefill for frame in router.frames for delta in frame.deltas if delta.HasField("prefill")]
        assert [(outcome.worker_id, outcome.epoch, outcome.fault) for outcome in reported] == [
            ("gone", 1, worker_pb2.PREFILL_FAULT_WORKER),
            ("prefill", prefill.epoch, worker_pb2.PREFILL_FAULT_NONE),
        ]


class _Deaf(worker_pb2_grpc.PrefillWorkerServicer):
    """Accepts a prefill and never starts it."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Prefill(
        self, commands: AsyncIterator[worker_pb2.PrefillCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        async for command in commands:
            if command.HasField("cancel"):
                self.cancelled.set()
                yield worker_pb2.PrefillEvent(closed=worker_pb2.PrefillClosed())
                return


async def test_a_prefill_that_does_not_start_is_hedged(model: Path, wanted: list[int]) -> None:
    deaf = _Deaf()
    server = GrpcServer([worker_pb2.DESCRIPTOR.services_by_name["PrefillWorker"]])
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(deaf, server.server)
    port = await server.start("127.0.0.1", 0)
    slow = worker_pb2.PrefillCandidate(worker_id="deaf", epoch=1, address=f"127.0.0.1:{port}")
    hedging = worker_config(Role.DECODE, model, decode={"hedge_after_s": 0.05})
    async with workers(worker_config(Role.PREFILL, model), hedging) as (prefill, decode):
        assert isinstance(prefill, PrefillServer)
        async with caller(decode) as router:
            answer = await router.answer(router.submit(PROMPT, GREEDY, [slow, prefill]))
            assert answer.token_ids == wanted[:16]
            assert answer.timing is not None
            assert answer.timing.prefill_worker == "prefill"
            async with asyncio.timeout(TIMEOUT_S):
                await deaf.cancelled.wait()
        await wait_until_empty(prefill, decode)
    await server.stop()


async def test_workers_of_different_models_refuse_each_other(
    model: Path, wanted: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=3)
    async with workers(worker_config(Role.PREFILL, other), worker_config(Role.DECODE, model)) as (prefill, decode):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
            assert answer.token_ids == wanted[:16]
            assert answer.timing is not None
            assert answer.timing.pages_moved == 0
        await wait_until_empty(prefill, decode)
    (refusal,) = [record.message for record in caplog.records if "failed" in record.message]
    assert prefill.worker._engine.layout.digest() in refusal
    assert decode.worker._engine.layout.digest() in refusal


async def test_a_prompt_too_long_for_the_prefill_worker_is_computed_locally(model: Path, wanted: list[int]) -> None:
    """Pools may differ in their context; a prefill worker refuses a prompt that it cannot hold and continues to
    serve."""
    short = worker_config(Role.PREFILL, model, engine={"max_context": 64})
    async with workers(short, worker_config(Role.DECODE, model)) as (prefill, decode):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
            assert answer.token_ids == wanted[:16]
            assert answer.timing is not None
            assert answer.timing.prefill_worker == "decode"
            fits = await router.answer(router.submit(PROMPT[:50], GREEDY, [prefill]))
            assert fits.timing is not None
            assert fits.timing.prefill_worker == "prefill"
        assert not prefill.failed.done()
        await wait_until_empty(prefill, decode)


def num_tokens(router: Caller) -> int:
    return sum(len(delta.token_ids) for frame in router.frames for delta in frame.deltas)


PHASES: dict[str, Callable[[Pair, Caller], bool]] = {
    "before it is sent": lambda pair, router: True,
    "prefilling": lambda pair, router: bool(pair[0].worker.load.prefill_steps),
    "transferring": lambda pair, router: pair[1].worker.load.free_pages < pair[1].worker.load.total_pages,
    "the first token": lambda pair, router: num_tokens(router) > 0,
    "decoding": lambda pair, router: pair[1].worker.load.num_running == 3,
    "decoding for long": lambda pair, router: num_tokens(router) > 100,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancel", "hang up"])
async def test_a_cancelled_request_releases_everything_unfinished(long_pair: Pair, phase: str, how: str) -> None:
    prefill, decode = long_pair
    async with caller(decode) as router:
        streams = [router.submit([token + number for token in PROMPT], ENDLESS, [prefill]) for number in range(3)]
        await until(lambda: PHASES[phase](long_pair, router))
        if how == "cancel":
            for stream in streams:
                router.cancel(stream)
            await wait_until_empty(prefill, decode)
            assert decode.worker.load.requests.ended == 0
            await router.answer(router.submit(PROMPT, GREEDY, [prefill]))  # everything sent before has arrived
            num_frames = len(router.frames)
            await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
            late = {delta.stream_id for frame in router.frames[num_frames:] for delta in frame.deltas}
            assert not late & set(streams)
    await wait_until_empty(prefill, decode)
    if how == "cancel":
        # The load is that of the last step or the one before.
        await until(lambda: decode.worker.load.requests.ended >= 2)
    assert decode.worker.load.requests.ended == (2 if how == "cancel" else 0)


async def test_a_deadline_ends_a_request_at_any_phase(long_pair: Pair) -> None:
    prefill, decode = long_pair
    async with caller(decode) as router:
        for timeout_s in (0.001, 0.02, 0.15):
            answer = await router.answer(router.submit(PROMPT, ENDLESS, [prefill], timeout_s=timeout_s))
            assert isinstance(answer.error, DeadlineExceeded)
    await wait_until_empty(prefill, decode)


async def test_frames_hold_every_sequence_of_a_step(long_pair: Pair) -> None:
    _, decode = long_pair
    async with caller(decode) as router:
        streams = {router.submit([9, number], ENDLESS) for number in range(6)}

        def whole() -> list[bool]:
            return [{delta.stream_id for delta in frame.deltas} == streams for frame in router.frames]

        await until(lambda: any(whole()))
        num_frames = whole().index(True)
        await until(lambda: len(router.frames) >= num_frames + 50)
        assert all(whole()[num_frames:])


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "token_ids: are empty; give at least one token"),
        ([1] * 512, "token_ids: are 512, but this worker holds 512 tokens of context; shorten the prompt"),
        ([1, 320], "token_ids: hold 320; the vocabulary ends at 319"),
    ],
)
async def test_bad_requests_are_refused_and_the_worker_stays_up(pair: Pair, token_ids: list[int], message: str) -> None:
    _, decode = pair
    async with caller(decode) as router:
        answer = await router.answer(router.submit(token_ids))
        assert isinstance(answer.error, InvalidInput)
        assert str(answer.error) == message
        assert len((await router.answer(router.submit([5, 6]))).token_ids) == 16


async def test_more_requests_than_the_limit_are_refused_with_a_hint(long_model: Path) -> None:
    limits = {"max_batch_sequences": 2, "max_batch_tokens": 8, "max_waiting": 1}
    config = worker_config(Role.DECODE, long_model, engine=ROOMY, decode=limits)
    async with workers(config) as (decode,), caller(decode) as router:
        streams = [router.submit(PROMPT, ENDLESS) for _ in range(5)]
        refused = [(await router.answer(stream)).error for stream in streams[3:]]
        assert all(isinstance(error, Overloaded) and error.retry_after_s for error in refused)
        for stream in streams[:3]:
            assert (await router.next_delta(stream)).token_ids
            router.cancel(stream)


async def test_finish_reasons_are_reported(pair: Pair, wanted: list[int]) -> None:
    prefill, decode = pair
    stop_token = next(token for token in wanted[4:] if token not in wanted[:4])
    stop = SamplingParams(max_tokens=200, temperature=0.0, stop_token_ids=(stop_token,), ignore_eos=True)
    async with caller(decode) as router:
        answer = await router.answer(router.submit(PROMPT, replace(GREEDY, max_tokens=1), [prefill]))
        assert (answer.token_ids, answer.finish_reason) == (wanted[:1], common_pb2.FINISH_REASON_LENGTH)
        stopped = await router.answer(router.submit(PROMPT, stop, [prefill]))
        assert stopped.finish_reason == common_pb2.FINISH_REASON_STOP
        assert stopped.token_ids == wanted[: wanted.index(stop_token) + 1]
        full = await router.answer(router.submit(PROMPT, replace(GREEDY, max_tokens=1000), [prefill]))
        assert (len(full.token_ids), full.finish_reason) == (512 - 200, common_pb2.FINISH_REASON_LENGTH)
    await wait_until_empty(prefill, decode)


async def test_cached_pages_are_announced_with_the_hashes_that_a_router_computes(pair: Pair) -> None:
    prefill, decode = pair
    hashes = hash_pages(PROMPT, 16, SALT)
    async with caller(decode) as router:
        await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
    for server in pair:
        async with make_channel(server.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            call = stub.WatchEvents(worker_pb2.WatchEventsRequest(epoch=server.epoch, next_seq=1), timeout=TIMEOUT_S)
            batch = await call.read()
            call.cancel()
            stored = {page for event in decode_events(batch.payload) for page in event.hashes}
            assert set(hashes) <= stored
            assert not batch.snapshot
            assert (batch.HasField("num_strays"), batch.num_strays) == (True, 0)
            stale = stub.WatchEvents(worker_pb2.WatchEventsRequest(epoch=1, next_seq=5), timeout=TIMEOUT_S)
            assert (await stale.read()).snapshot
            stale.cancel()


async def test_a_worker_without_events_reports_that_it_has_none(model: Path, wanted: list[int]) -> None:
    config = worker_config(Role.DECODE, model, engine={"kv_events": False}, decode={"placement": "local"})
    async with workers(config) as (decode,):
        assert isinstance(decode, DecodeServer)
        async with caller(decode) as router:
            for _ in range(2):
                assert (await router.answer(router.submit(PROMPT, GREEDY, []))).token_ids == wanted[:16]
        async with make_channel(decode.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            assert (await stub.Describe(worker_pb2.DescribeRequest())).silent_cache
            call = stub.WatchEvents(worker_pb2.WatchEventsRequest(), timeout=TIMEOUT_S)
            batch = await call.read()
            call.cancel()
        assert decode_events(batch.payload) == ()
        assert batch.load.cache.device_hits == 12  # the cache itself works


async def test_health_and_reflection_are_served(pair: Pair) -> None:
    for server, service in zip(pair, ("PrefillWorker", "DecodeWorker"), strict=True):
        async with make_channel(server.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            for version in ("v1", "v1alpha"):  # some tools know only one of the two
                ask = channel.stream_stream(
                    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                    request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                    response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
                )
                async for answer in ask(iter([question]), timeout=TIMEOUT_S):
                    names = {found.name for found in answer.list_services_response.service}
                    assert {"penstock.v1.Worker", f"penstock.v1.{service}", "grpc.health.v1.Health"} <= names
                    break


async def test_an_unknown_transfer_is_not_open(pair: Pair) -> None:
    prefill, _ = pair
    async with make_channel(prefill.address) as channel:
        key = worker_pb2.TransferKey(transfer_id="nobody's", sender_epoch=prefill.epoch, receiver_epoch=1)
        stub = worker_pb2_grpc.WorkerStub(channel)
        state = await stub.TransferState(worker_pb2.TransferStateRequest(transfer=key), timeout=TIMEOUT_S)
        assert (state.open, state.epoch) == (False, prefill.epoch)


async def test_a_prefill_call_must_begin_with_start(pair: Pair) -> None:
    prefill, _ = pair
    async with make_channel(prefill.address) as channel:
        command = worker_pb2.PrefillCommand(cancel=worker_pb2.PrefillCancel())
        with pytest.raises(grpc.RpcError, match="the call must begin with start"):
            await worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(iter([command]), timeout=TIMEOUT_S).read()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_stopping_worker_listens_until_its_sender_has_finished_writing(
    model: Path, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receivers take a refused connection as permission to reuse the pages that it may write."""
    listened: list[bool] = []
    async with workers(worker_config(role, model)) as (server,):
        host, _, port = server.address.rpartition(":")
        shut_down = server.shell.sender.shutdown

        def note() -> None:
            shut_down()
            try:
                socket.create_connection((host, int(port)), TIMEOUT_S).close()
                listened.append(True)
            except ConnectionRefusedError:
                listened.append(False)

        monkeypatch.setattr(server.shell.sender, "shutdown", note)
    assert listened == [True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), TIMEOUT_S)
