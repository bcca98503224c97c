"""Migrates running sequences between real decode workers in this process: no token and no page is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
import pytest

from decode_worker import server as decode_server
from decode_worker.migrate.outgoing import CopyPhase, OutgoingMigration
from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from engine.step.compute import PreparedStep, SampledTokens
from penstock.config import EngineConfig
from penstock.errors import DeadlineExceeded, Overloaded, TransferError, TransferRefused, from_rpc_error, from_status
from penstock.rpc.server import make_channel
from penstock.types import Lane, Role, SamplingParams
from penstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.decode_worker.schedule.test_prompt_stream import held_prompts
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.serving import GREEDY, SALT, TIMEOUT_S, Caller, caller, wait_until_empty, worker_config, workers

LONG = replace(GREEDY, max_tokens=300)
# These values are exact in single precision, the precision of the wire format.
PENALIZED = SamplingParams(
    max_tokens=300,
    temperature=0.75,
    top_p=0.875,
    seed=7,
    ignore_eos=True,
    repetition_penalty=1.25,
    frequency_penalty=0.5,
    presence_penalty=0.25,
)
PROMPT = [(5 * i) % 300 + 2 for i in range(150)]
STEP_S = 0.003  # least time of a step, so that a sequence of 300 tokens is still running when a migration begins
LEASE_S = 0.5  # set only where a sequence without its router must be dropped; no other test may depend on time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@functools.cache
def reference_engine(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))


def single_process(model: Path, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    return generate(reference_engine(model), list(prompt), sampling, SALT, use_prefix_cache=False)


@dataclass
class Streamed:
    """Records what a client has received of one stream, on whichever worker it ran."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # the arrival time of each token
    finish_reason: int = 0
    timing: common_pb2.Timing | None = None
    error: Exception | None = None
    num_migrations: int = 0


class Router:
    """Follows streams between decode workers, as a router does."""

    def __init__(self, callers: dict[int, Caller]) -> None:
        self._callers = callers

    async def stream(
        self,
        server: DecodeServer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        timeout_s: float = TIMEOUT_S,
        lane: Lane = Lane.STANDARD,
    ) -> Streamed:
        seen, at = Streamed(), self._callers[server.epoch]
        deadline_s = time.monotonic() + timeout_s
        number = at.submit(prompt, sampling, timeout_s=timeout_s, lane=lane)
        while True:
            delta = await at.next_delta(number)
            seen.token_ids += delta.token_ids
            seen.times_s += [time.monotonic()] * len(delta.token_ids)
            if delta.HasField("error"):
                seen.error = from_status(delta.error)
                return seen
            if delta.finish_reason:
                seen.finish_reason, seen.timing = delta.finish_reason, delta.timing
                return seen
            if delta.HasField("migrated"):
                seen.num_migrations += 1
                at = self._callers[delta.migrated.epoch]
                so_far = [*prompt, *seen.token_ids]
                left_s = max(0.001, deadline_s - time.monotonic())
                number = at.submit(
                    so_far,
                    sampling,
                    num_prompt_tokens=len(prompt),
                    timeout_s=left_s,
                    ticket=delta.migrated.ticket,
                    lane=lane,
                )


@dataclass
class Pair:
    """Holds two decode workers and a router that is connected to both."""

    left: DecodeServer
    right: DecodeServer
    router: Router


def take_time(engine: Engine) -> None:
    compute = engine.compute

    def slow(step: PreparedStep, previous: SampledTokens | None = None) -> SampledTokens:
        time.sleep(STEP_S)
        return compute(step, previous)

    engine.compute = slow  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def running_pair(
    model: Path, other: Path | None = None, num_pages: int = 256, page_size: int = 16, prompt_sm_share: float = 0
) -> AsyncIterator[Pair]:
    """Runs two decode workers; `other`, `num_pages` and `page_size` configure the right one."""
    decode: dict[str, object] = {"prompt_sm_share": prompt_sm_share}
    checked, pages = {"checksums": True}, {"num_pages": num_pages, "page_size": page_size}
    async with workers(
        worker_config(Role.DECODE, model, "left", engine={"num_pages": 256}, transfer=checked, decode=decode),
        worker_config(Role.DECODE, other or model, "right", engine=pages, transfer=checked, decode=decode),
    ) as (first, second):
        assert isinstance(first, DecodeServer)
        assert isinstance(second, DecodeServer)
        for server in (first, second):
            take_time(server.worker._engine)
        async with caller(first) as to_first, caller(second) as to_second:
            yield Pair(first, second, Router({first.epoch: to_first, second.epoch: to_second}))
        await wait_until_empty(first, second)
        await until(lambda: not any(server.outgoing.num_open or server.incoming.num_kept for server in (first, second)))


@pytest.fixture
async def pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(decode_server, "LEASE_S", TIMEOUT_S)  # on a busy machine the router connects late
    async with running_pair(model) as made:
        yield made


@pytest.fixture
async def hasty_pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Yields workers that wait only briefly for a router."""
    monkeypatch.setattr(decode_server, "LEASE_S", LEASE_S)
    async with running_pair(model) as made:
        yield made


async def migrate(
    source: DecodeServer, target: DecodeServer, max_sequences: int = 0, epoch: int = 0
) -> worker_pb2.MigrateResponse:
    request = worker_pb2.MigrateRequest(
        worker_id="target", epoch=epoch or target.epoch, address=target.address, max_sequences=max_sequences
    )
    async with make_channel(source.address) as channel:
        return await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=TIMEOUT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - workers announce no such event
            await asyncio.sleep(0.005)


async def until_running(server: DecodeServer, count: int) -> None:
    """Waits until so many sequences decode; one whose prompt is being computed runs, but cannot migrate yet."""
    worker = server.worker
    await until(lambda: sum(worker.scheduler.is_running(each.sequence) for each in tuple(worker.requests)) >= count)


def longest_gap_ms(seen: Streamed) -> float:
    return max(later - earlier for earlier, later in zip(seen.times_s, seen.times_s[1:], strict=False)) * 1e3


@pytest.mark.parametrize(("sampling", "enough"), [(LONG, 12), (PENALIZED, 36)], ids=["greedy", "penalized"])
async def test_migrations_under_load_lose_and_repeat_nothing(
    pair: Pair, model: Path, sampling: SamplingParams, enough: int
) -> None:
    rng = random.Random(1)
    prompts = [rng.choices(range(2, VOCAB_SIZE), k=length) for length in (1, 15, 16, 17, 64, 150)]
    wanted = [single_process(model, prompt, sampling) for prompt in prompts]
    num_migrations, seen = 0, []
    while num_migrations < enough:
        streams = [asyncio.create_task(pair.router.stream(pair.left, prompt, sampling)) for prompt in prompts]
        await until_running(pair.left, len(prompts))
        source, target = pair.left, pair.right
        while num_migrations < enough and not all(stream.done() for stream in streams):
            response = await migrate(source, target)
            # A sequence that does not migrate continues here; on a busy machine some migrations time out.
            reasons = ("has ended", "within", "no room", "outgrew", "preempted")
            assert all(any(reason in failure.error.message for reason in reasons) for failure in response.failed), (
                response
            )
            num_migrations += len(response.migrated)
            source, target = target, source
        seen = [await stream for stream in streams]
        assert [stream.token_ids for stream in seen] == wanted
        assert [stream.error for stream in seen] == [None] * len(seen)
    timings = [stream.timing for stream in seen if stream.timing is not None]
    assert [timing.num_migrations for timing in timings] == [stream.num_migrations for stream in seen]
    pauses_ms = [timing.migration_pause_ms / max(1, timing.num_migrations) for timing in timings]
    gaps_ms = [longest_gap_ms(stream) for stream in seen]
    pauses = [f"{pause_ms:.1f}" for pause_ms in pauses_ms]
    print(f"\n{num_migrations} migrations; mean pauses {pauses} ms; gaps {max(gaps_ms):.0f} ms at most")
    assert max(pauses_ms) > 0
    assert all(timing.migration_pause_ms <= timing.decode_ms for timing in timings)


async def test_timing_counts_what_both_workers_did(pair: Pair) -> None:
    stream = asyncio.create_task(pair.router.stream(pair.left, PROMPT, LONG))
    await until_running(pair.left, 1)
    assert len((await migrate(pair.left, pair.right)).migrated) == 1
    seen = await stream
    assert seen.timing is not None
    timing = seen.timing
    assert (timing.num_migrations, timing.decode_worker, timing.prefill_worker) == (1, "right", "left")
    assert timing.pages_moved >= len(PROMPT) // 16
    assert timing.first_token_ms < timing.decode_ms
    assert timing.prefill_ms > 0


async def test_bulk_that_is_held_back_migrates_to_a_worker_where_it_runs(pair: Pair, model: Path) -> None:
    bulk = asyncio.create_task(pair.router.stream(pair.left, PROMPT[:20], LONG, lane=Lane.BULK))
    await until_running(pair.left, 1)
    other = asyncio.create_task(pair.router.stream(pair.left, PROMPT[:30], LONG))
    await until_running(pair.left, 2)
    assert len((await migrate(pair.left, pair.right)).migrated) == 2
    for stream, length in ((bulk, 20), (other, 30)):
        seen = await stream
        assert (seen.num_migrations, seen.token_ids) == (1, single_process(model, PROMPT[:length], LONG))


async def test_max_sequences_limits_how_many_migrate(pair: Pair, model: Path) -> None:
    streams = [asyncio.create_task(pair.router.stream(pair.left, PROMPT[:n], LONG)) for n in (20, 30, 40)]
    await until_running(pair.left, 3)
    response = await migrate(pair.left, pair.right, max_sequences=1)
    assert (len(response.migrated), len(response.failed), response.num_left) == (1, 0, 2)
    seen = [await stream for stream in streams]
    assert [stream.token_ids for stream in seen] == [single_process(model, PROMPT[:n], LONG) for n in (20, 30, 40)]
    assert sorted(stream.num_migrations for stream in seen) == [0, 0, 1]


async def test_two_sequences_of_one_request_both_migrate(hasty_pair: Pair) -> None:
    # This happens when a sequence waits for its router while the same request is submitted again.
    pair = hasty_pair
    async with caller(pair.left) as first, caller(pair.left) as second:
        number = first.submit(PROMPT, LONG)
        assert second.submit(PROMPT, LONG) == number  # makes both sequences share the request id, too
        await first.next_delta(number)
        await second.next_delta(number)
        response = await migrate(pair.left, pair.right)
        assert (len(response.migrated), len(set(response.migrated)), response.num_left) == (2, 1, 0)


@pytest.mark.parametrize("page_size", [8, 24, 64])
async def test_sequences_migrate_between_workers_of_different_page_sizes(
    model: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_server, "LEASE_S", TIMEOUT_S)
    async with running_pair(model, page_size=page_size) as pair:
        stream = asyncio.create_task(pair.router.stream(pair.left, PROMPT, PENALIZED))
        await until_running(pair.left, 1)
        for source, target in [(pair.left, pair.right), (pair.right, pair.left)] * 2:
            assert len((await migrate(source, target)).migrated) == 1
        seen = await stream
        assert (seen.token_ids, seen.num_migrations) == (single_process(model, PROMPT, PENALIZED), 4)


async def test_a_sequence_migrates_while_both_workers_compute_prompts_beside_decode_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_server, "LEASE_S", TIMEOUT_S)
    other = PROMPT[100::-1]  # without a cached prefix
    with held_prompts(len(other)) as (_, may_end):
        async with running_pair(model, prompt_sm_share=0.3) as pair:
            stream = asyncio.create_task(pair.router.stream(pair.left, PROMPT, PENALIZED))
            await until_running(pair.left, 1)
            held = [asyncio.create_task(pair.router.stream(each, other, LONG)) for each in (pair.left, pair.right)]
            await until(lambda: all(each.worker.scheduler.prompts.in_flight for each in (pair.left, pair.right)))
            for source, target in ((pair.left, pair.right), (pair.right, pair.left)):
                assert len((await migrate(source, target)).migrated) == 1
            may_end.set()
            seen = await stream
            assert (seen.token_ids, seen.num_migrations) == (single_process(model, PROMPT, PENALIZED), 2)
            assert [each.token_ids for each in await asyncio.gather(*held)] == [single_process(model, other, LONG)] * 2


async def test_a_worker_that_listens_on_every_interface_migrates_under_the_callers_address(model: Path) -> None:
    left, right = (worker_config(Role.DECODE, model, name) for name in ("left", "right"))
    async with workers(left.model_copy(update={"host": "0.0.0.0"}), right) as (source, target):
        assert isinstance(source, DecodeServer)
        assert isinstance(target, DecodeServer)
        address = f"127.0.0.1:{source.address.rpartition(':')[2]}"
        request = worker_pb2.MigrateRequest(worker_id="right", epoch=target.epoch, address=target.address)
        async with caller(address) as to_left, caller(target) as to_right, make_channel(address) as channel:
            stub = worker_pb2_grpc.DecodeWorkerStub(channel)
            stream = asyncio.create_task(
                Router({source.epoch: to_left, target.epoch: to_right}).stream(source, PROMPT, LONG)
            )
            await until_running(source, 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Migrate(request, timeout=TIMEOUT_S)
            assert "source_address: is '0.0.0.0:" in str(from_rpc_error(caught.value))
            request.source_address = address
            assert len((await stub.Migrate(request, timeout=TIMEOUT_S)).migrated) == 1
            seen = await stream
        assert (seen.token_ids, seen.num_migrations) == (single_process(model, PROMPT, LONG), 1)


async def test_a_full_target_refuses_and_the_stream_goes_on(model: Path) -> None:
    async with running_pair(model) as pair:
        # Nothing else runs on this worker, and its context holds the stream whatever its length.
        pool = pair.right.worker._engine.pool
        held = pool.allocate(pool.num_free - 1)
        stream = asyncio.create_task(pair.router.stream(pair.left, PROMPT[:110], LONG))
        await until_running(pair.left, 1)
        (failure,) = (await migrate(pair.left, pair.right)).failed
        assert isinstance(from_status(failure.error), Overloaded)
        seen = await stream
        pool.release(held)
        assert (seen.token_ids, seen.num_migrations) == (single_process(model, PROMPT[:110], LONG), 0)


async def test_targets_with_another_layout_or_epoch_are_refused(model: Path, tmp_path: Path) -> None:
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=3)
    async with running_pair(model, other) as pair:
        stream = asyncio.create_task(pair.router.stream(pair.left, PROMPT, LONG))
        await until_running(pair.left, 1)
        (failure,) = (await migrate(pair.left, pair.right)).failed
        refusal = from_status(failure.error)
        assert isinstance(refusal, TransferRefused)
        assert pair.left.worker._engine.layout.digest() in refusal.message
        assert pair.right.worker._engine.layout.digest() in refusal.message
        (failure,) = (await migrate(pair.left, pair.right, epoch=12345)).failed
        assert isinstance(from_status(failure.error), TransferError)
        assert "receiver epoch 12345" in failure.error.message
        assert (await stream).token_ids == single_process(model, PROMPT, LONG)


async def test_a_client_that_leaves_during_a_migration_leaves_no_page_behind(hasty_pair: Pair) -> None:
    source, target = hasty_pair.left, hasty_pair.right
    outcomes = [0, 0, 0]

    async def leave_once(has_come: Callable[[], bool]) -> None:
        """Lets the client cancel two of its streams as soon as the migrations have reached a stage."""
        nonlocal outcomes
        async with caller(source) as leaving:
            numbers = [leaving.submit([*PROMPT, number], LONG) for number in range(3)]
            for number in numbers:
                await leaving.next_delta(number)
            migrating = asyncio.create_task(migrate(source, target))
            await until(lambda: has_come() or migrating.done())
            leaving.cancel(numbers[0])
            leaving.cancel(numbers[1])
        response = await migrating
        found = [len(response.migrated), len(response.failed), 3 - len(response.migrated) - len(response.failed)]
        outcomes = [so_far + now for so_far, now in zip(outcomes, found, strict=True)]
        await wait_until_empty(source, target)

    def some(condition: Callable[[OutgoingMigration], bool]) -> bool:
        return any(condition(migration) for migration in list(source.outgoing._migrations.values()))

    await leave_once(lambda: True)
    await leave_once(lambda: source.outgoing.num_open > 0)
    await leave_once(lambda: some(lambda migration: migration.num_landed > 0))
    await leave_once(lambda: some(lambda migration: migration.phase is CopyPhase.PAUSED))
    async with asyncio.timeout(TIMEOUT_S):
        while not outcomes[0]:  # on a busy machine a migration may time out
            num_before = source.outgoing.num_migrated
            await leave_once(lambda num_before=num_before: source.outgoing.num_migrated > num_before)  # type: ignore[misc]
    assert outcomes[0] > 0
    assert outcomes[0] < sum(outcomes)


async def test_a_deadline_holds_on_either_worker(hasty_pair: Pair) -> None:
    for timeout_s in (0.1, 0.15, 0.2):
        streams = [
            asyncio.create_task(hasty_pair.router.stream(hasty_pair.left, PROMPT[: 20 + n], LONG, timeout_s))
            for n in range(3)
        ]
        await until(lambda: hasty_pair.left.worker.load.num_running >= 1 or all(stream.done() for stream in streams))  # noqa: B023
        source, target = hasty_pair.left, hasty_pair.right
        while not all(stream.done() for stream in streams):
            await migrate(source, target)
            source, target = target, source
        for stream in streams:
            seen = await stream
            assert isinstance(seen.error, DeadlineExceeded) or len(seen.token_ids) == LONG.max_tokens
        await wait_until_empty(hasty_pair.left, hasty_pair.right)


async def test_a_request_with_an_unknown_ticket_is_served_as_an_ordinary_request(pair: Pair, model: Path) -> None:
    wanted = single_process(model, PROMPT, LONG)
    async with caller(pair.right) as router:
        number = router.submit([*PROMPT, *wanted[:5]], LONG, num_prompt_tokens=len(PROMPT), ticket="unknown")
        assert (await router.answer(number)).token_ids == wanted[5:]
