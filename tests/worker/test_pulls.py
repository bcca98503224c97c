"""Tests pulled prefixes: the predicted gain, answers that stay the same, and pulls that fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from kv_transfer.receive import receiver as transfer_receiver
from penstock.config import EngineConfig, TransferConfig
from penstock.errors import PenstockError, TransferError
from penstock.kv.page_hash import hash_pages
from penstock.metrics.worker_metrics import PULL_FAILURES, PULLED_PAGES, PULLS, PULLS_CANCELLED
from penstock.rpc.server import make_channel
from penstock.types import Epoch, PageHash, Role, SamplingParams, StepTotals, WorkerId
from penstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.pulled_pages import pull
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
from worker.handover import client as handover_client
from worker.handover import policy as handover_policy
from worker.pull.client import PullRequest
from worker.pull.policy import MissingPages, PrefixSource, PullCosts, PullPlan
from worker.pull.prompts import PrefixPulls

PAGE = 16
PROMPT = [(5 * i) % 300 + 2 for i in range(200)]
PULLED = (len(PROMPT) - 1) // PAGE * PAGE
Server = PrefillServer | DecodeServer
LONG = replace(GREEDY, max_tokens=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@functools.cache
def expected(model: Path, max_tokens: int = GREEDY.max_tokens) -> list[int]:
    engine = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))
    return generate(engine, PROMPT, replace(GREEDY, max_tokens=max_tokens), SALT)


# The prediction.

SOURCE = PrefixSource(WorkerId("source"), Epoch(1), "host:1", "host:2", 1 << 20)
CHEAP = replace(SOURCE, pull_s=0.01, compute_s=9.0)
MISSING = MissingPages(num_tokens=1000, num_before=0, num_bytes=10_000_000)


def test_small_chunks_do_not_make_large_ones_look_slow() -> None:
    costs = PullCosts(256)
    steps = tokens = 0
    seconds = 0.0
    for round_ in range(60):  # a step takes 20 ms, and a token 0.3 ms
        num_steps, num_tokens = (8, 2048) if round_ % 3 == 0 else (1, 16)
        steps, tokens, seconds = steps + num_steps, tokens + num_tokens, seconds + num_steps * 0.02 + num_tokens * 3e-4
        costs.on_steps(StepTotals(steps, tokens, 0.0, seconds))
    plan = costs.plan(replace(SOURCE, pull_s=0.001), MISSING, 0.0)
    assert plan is not None
    assert plan.compute_s == pytest.approx(0.02 * 1000 / 256 + 0.3, rel=0.2)


def learned(token_s: float) -> PullCosts:
    costs = PullCosts(256)
    for step in range(1, 30):
        costs.on_steps(StepTotals(step, 1000 * step, 0.0, 1000 * token_s * step))
    return costs


@pytest.mark.parametrize(
    ("pull_s", "compute_s", "is_worth_it"), [(0.1, 1.0, True), (5.0, 1.0, False), (50.0, 1.0, False)]
)
def test_the_routers_prediction_counts_until_something_is_learned(
    pull_s: float, compute_s: float, is_worth_it: bool
) -> None:
    plan = PullCosts(256).plan(replace(SOURCE, pull_s=pull_s, compute_s=compute_s), MISSING, 0.0)
    assert (plan is not None) == is_worth_it
    if plan is not None:
        assert plan.ready_s == pytest.approx(pull_s, rel=0.01)
        assert plan.compute_s == compute_s


@pytest.mark.parametrize(
    ("pull_s", "needs_all", "ready_s"),
    [
        (0.1, False, 0.1),  # shorter than a step: the prompt waits for it
        (1.0, False, 0.5 + 0.256),  # both ends meet after half the time, give or take a step
        (0.3, True, 0.3),
        (1.0, True, None),
        (9.0, False, None),
    ],
)
def test_the_gain_depends_on_whether_the_prompt_needs_all_pages(
    pull_s: float, needs_all: bool, ready_s: float | None
) -> None:
    source, missing = replace(SOURCE, pull_s=pull_s, compute_s=1.0), replace(MISSING, needs_all=needs_all)
    plan = PullCosts(256).plan(source, missing, 0.0)
    assert (plan.ready_s if plan else None) == (ready_s if ready_s is None else pytest.approx(ready_s, rel=0.01))
    if plan is not None:
        assert (plan.hold_s > 0.0) == (plan.ready_s < 0.5)


def test_a_slow_source_is_avoided_until_its_measurement_is_forgotten() -> None:
    costs, now_s = learned(1e-3), 0.0
    assert costs.plan(SOURCE, MISSING, now_s) is not None
    costs.on_pulled(SOURCE, MISSING, 3.0, now_s)
    assert costs.plan(SOURCE, MISSING, now_s) is None
    assert costs.plan(replace(SOURCE, worker_id=WorkerId("other")), MISSING, now_s) is not None
    assert costs.plan(SOURCE, MISSING, now_s + 61.0) is not None


def test_a_failing_source_is_avoided_for_a_while() -> None:
    costs = learned(1e-3)
    costs.on_failed(SOURCE, MISSING, 0.001, 10.0)
    assert costs.plan(SOURCE, MISSING, 12.0) is None
    assert costs.plan(SOURCE, MISSING, 16.0) is not None


@given(
    pull_s=st.floats(0, 1e3),
    compute_s=st.floats(0, 1e3),
    num_bytes=st.integers(1, 1 << 40),
    outcomes=st.lists(st.tuples(st.booleans(), st.floats(0, 100))),
)
def test_no_prompt_waits_longer_than_one_step_takes(
    pull_s: float, compute_s: float, num_bytes: int, outcomes: list[tuple[bool, float]]
) -> None:
    costs, now_s = PullCosts(256), 0.0
    source, missing = replace(SOURCE, pull_s=pull_s, compute_s=compute_s), replace(MISSING, num_bytes=num_bytes)
    for is_whole, seconds in outcomes:
        plan = costs.plan(source, missing, now_s)
        if plan is not None:
            assert plan.ready_s < plan.compute_s
            assert plan.hold_s <= plan.compute_s * (256 / MISSING.num_tokens)
        now_s += seconds
        (costs.on_pulled if is_whole else costs.on_failed)(source, missing, seconds, now_s)


# Waiting prompts, over an engine's cache alone.


class Waiting:
    """Stands in for a sequence, as far as a pull needs it."""

    lane = "standard"
    scores_prompt = False
    num_computed_tokens = 0

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def hash_full_pages(self, size: int) -> list[PageHash]:
        return hash_pages(self.token_ids, size, SALT)


class Pulls:
    """Holds the `PrefixPulls` of an empty cache; the test ends each pull."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.engine = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1))
        self.asked: list[tuple[PullRequest, Callable[[PenstockError | None], None]]] = []
        self.ended: list[common_pb2.Pull | None] = []
        self.stopped: list[int] = []  # places in `asked`
        config = TransferConfig.model_validate({"min_pull_tokens": PAGE} | settings)
        self.now_s = 0.0
        self.pulls = PrefixPulls(self.engine, self.start, StepTotals, config, clock=lambda: self.now_s)

    def start(self, request: PullRequest, on_end: Callable[[PenstockError | None], None]) -> Callable[[], object]:
        number = len(self.asked)
        self.asked.append((request, on_end))
        return lambda: self.stopped.append(number)

    def bring(self, prompt: list[int], source: PrefixSource | None = CHEAP) -> Any:
        """Returns the sequence of the prompt."""
        sequence: Any = Waiting(prompt)
        self.pulls.bring(sequence, source, self.ended.append)
        return sequence

    def land(self, stop: int, first: int = 0) -> None:
        """Caches pages of `PROMPT`, as a batch that has arrived does."""
        pull(self.engine.prefix_cache, hash_pages(PROMPT, PAGE, SALT), range(first, stop))


def test_prompts_that_lack_the_same_pages_wait_for_one_pull(model: Path) -> None:
    world = Pulls(model)
    world.bring(PROMPT)
    world.bring(PROMPT)
    world.bring([*PROMPT[:64], 1, *PROMPT[65:]])  # shares four pages
    assert len(world.asked) == 1
    assert not world.ended
    request, on_end = world.asked[0]
    assert list(request.hashes) == hash_pages(PROMPT, PAGE, SALT)[: PULLED // PAGE]
    world.land(PULLED // PAGE)
    on_end(None)
    assert [pull.pulled_tokens for pull in world.ended if pull] == [PULLED, PULLED, 64]
    assert world.pulls.num_open == 0
    world.bring(PROMPT)
    assert world.ended[-1] is None  # nothing is left to pull


def test_a_pull_stops_when_the_last_waiting_prompt_ends(model: Path) -> None:
    world = Pulls(model)
    first, second = world.bring(PROMPT), world.bring(PROMPT)
    world.pulls.leave(first)
    assert not world.stopped
    world.pulls.leave(second)
    world.pulls.leave(second)
    assert world.stopped == [0]
    assert world.pulls.num_open == 0
    world.bring(PROMPT)  # pulls again
    world.asked[0][1](TransferError("it was stopped"))
    assert (len(world.asked), world.pulls.num_open, world.ended) == (2, 1, [])
    world.land(PULLED // PAGE)
    world.asked[1][1](None)
    assert [pull.pulled_tokens for pull in world.ended if pull] == [PULLED]
    assert (world.pulls.metrics.values()[PULLS.name], world.pulls.metrics.values()[PULLS_CANCELLED.name]) == (2, 1)
    assert PULL_FAILURES.name not in world.pulls.metrics.values()


def test_a_prompt_waits_for_a_short_pull_only_for_a_while(model: Path) -> None:
    world = Pulls(model)
    world.bring(PROMPT)
    due_s = world.pulls.sweep(0.0)
    assert due_s is not None
    assert not world.ended
    assert world.pulls.sweep(due_s) is None
    assert len(world.ended) == world.pulls.num_open == 1
    world.now_s = due_s
    world.bring(PROMPT)  # shares the pull, and is computed at once
    assert (len(world.asked), len(world.ended)) == (1, 2)


@pytest.mark.parametrize(("num_landed", "num_failures"), [(0, 1), (3, 0)])
def test_a_pull_stops_when_its_prompt_is_computed_and_fails_if_nothing_came(
    model: Path, num_landed: int, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PullCosts, "plan", lambda self, source, missing, now_s: PullPlan(1.0, 2.0, 0.0, 0.1))
    world = Pulls(model)
    sequence = world.bring(PROMPT)
    request, on_end = world.asked[0]
    assert (request.latest_first, request.batch_s, len(world.ended)) == (True, 0.1, 1)
    num_pages, cache, pool = PULLED // PAGE, world.engine.prefix_cache, world.engine.pool
    world.land(num_pages, num_pages - num_landed)
    computed = pool.allocate(num_pages - num_landed)
    cache.insert(hash_pages(PROMPT, PAGE, SALT)[: len(computed)], computed)
    pool.release(computed)
    world.pulls.sweep(0.5)
    assert not world.stopped
    world.now_s, sequence.num_computed_tokens = 0.7, PULLED
    world.pulls.sweep(0.7)
    assert (world.stopped, world.pulls.num_open, cache.is_awaiting) == ([0], 0, False)
    on_end(TransferError("it was stopped"))
    assert world.ended[0] == common_pb2.Pull(
        source="source", wanted_tokens=PULLED, pulled_tokens=num_landed * PAGE, pull_ms=700.0
    )
    metrics = world.pulls.metrics.values()
    assert (metrics[PULLS.name], metrics.get(PULL_FAILURES.name, 0)) == (1, num_failures)
    cache.check_integrity()


def test_pages_that_no_prompt_needs_any_more_are_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PullCosts, "plan", lambda self, source, missing, now_s: PullPlan(1.0, 2.0, 0.0, 0.1))
    world = Pulls(model)
    sequence = world.bring(PROMPT)
    world.land(PULLED // PAGE, 8)
    assert world.engine.prefix_cache.num_cached == PULLED // PAGE - 8
    world.pulls.leave(sequence)
    assert world.engine.prefix_cache.num_cached == 0
    world.engine.prefix_cache.check_integrity()


def test_only_uncached_pages_are_requested(model: Path) -> None:
    world = Pulls(model)
    world.land(5)
    world.bring(PROMPT, replace(CHEAP, cached_tokens=9 * PAGE + 3))
    assert list(world.asked[0][0].hashes) == hash_pages(PROMPT, PAGE, SALT)[5:9]


@pytest.mark.parametrize("settings", [{"pull": False}, {"min_pull_tokens": 500}])
def test_nothing_is_pulled_if_disabled_or_not_worth_it(model: Path, settings: dict[str, Any]) -> None:
    world = Pulls(model, **settings)
    world.bring(PROMPT)
    world.bring(PROMPT, None)
    assert world.ended == [None, None]
    assert not world.asked


def test_pulls_beyond_the_limit_are_computed(model: Path) -> None:
    world = Pulls(model, max_pulls=1)
    world.bring(PROMPT)
    world.bring(PROMPT[16:])
    assert (len(world.asked), world.ended) == (1, [None])


# Real workers.


@pytest.fixture
def always() -> Iterator[None]:
    """Predicts that every pull pays, although these models compute a prompt in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PullCosts, "plan", lambda self, source, missing, now_s: PullPlan(0.001, 20.0, 20.0))
        yield


@contextlib.asynccontextmanager
async def fleet(model: Path, *roles: Role, **parts: Any) -> AsyncIterator[list[Any]]:
    """Starts workers that pull pages of any prompt, and checks at the end that none of them holds a page."""
    parts = {"decode": {"placement": "local"}, "transfer": {"min_pull_tokens": PAGE}} | parts
    configs = [worker_config(role, model, f"{role.value}-{number}", **parts) for number, role in enumerate(roles)]
    async with workers(*configs) as servers:
        yield servers
        await wait_until_empty(*servers)


def source(of: Server, to: Server, **changes: Any) -> worker_pb2.PrefixSource:
    made = worker_pb2.PrefixSource(
        worker_id=of.shell.config.worker_id,
        epoch=of.epoch,
        address=of.address,
        own_address=to.address,
        cached_tokens=len(PROMPT),
    )
    made.MergeFrom(worker_pb2.PrefixSource(**changes))
    return made


async def ask(
    decode: DecodeServer,
    pulled_from: worker_pb2.PrefixSource | None = None,
    prefill: worker_pb2.PrefillCandidate | None = None,
    sampling: SamplingParams = GREEDY,
) -> Answer:
    async with caller(decode) as to_it:
        stream = to_it.submit(PROMPT, sampling, [prefill] if prefill else [], source=pulled_from)
        answer = await to_it.answer(stream)
    assert answer.error is None
    return answer


def pull_of(answer: Answer) -> common_pb2.Pull:
    assert answer.timing is not None
    return answer.timing.pull


def metric(server: Server, name: str) -> float:
    return server.shell._load().metrics.get(name, 0.0)


@pytest.mark.parametrize("transport", ["shm", "torch"])
async def test_a_decode_worker_pulls_what_another_one_holds(model: Path, transport: str, always: None) -> None:
    transfer = {"transport": transport, "min_pull_tokens": PAGE}
    async with fleet(model, Role.DECODE, Role.DECODE, transfer=transfer) as (holder, puller):
        await ask(holder)
        answers = await asyncio.gather(*(ask(puller, source(holder, puller)) for _ in range(3)))
        for answer in answers:
            assert answer.token_ids == expected(model)
            assert (pull_of(answer).pulled_tokens, pull_of(answer).problem) == (PULLED, "")
            assert answer.timing is not None
            assert answer.timing.cached_tokens == PULLED
        assert metric(puller, PULLS.name) == 1  # for all three prompts
        assert metric(puller, PULLED_PAGES.name) == PULLED // PAGE
        again = await ask(puller, source(holder, puller))
        assert not pull_of(again).source


async def test_a_prefill_worker_pulls_from_prefill_and_decode_workers(model: Path, always: None) -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    async with fleet(model, *roles, decode={"placement": "remote"}) as (first, second, decode, other):
        await ask(decode, prefill=candidate(first))
        assert first.worker.scheduler.num_queued == 0
        # The page goes from a decode worker to a prefill worker.
        pulled = await ask(other, prefill=candidate(second, source(decode, second)))
        assert pulled.token_ids == expected(model)
        assert pull_of(pulled).pulled_tokens == PULLED
        assert pulled.timing is not None
        assert pulled.timing.prefill_cached_tokens == PULLED
        first.shell.loop.post(first.shell._engine.prefix_cache.clear)
        other.shell.loop.post(other.shell._engine.prefix_cache.clear)
        back = await ask(other, prefill=candidate(first, source(second, first)))
        assert (back.token_ids, pull_of(back).source) == (expected(model), "prefill-1")


def candidate(server: PrefillServer, pulled_from: worker_pb2.PrefixSource | None = None) -> worker_pb2.PrefillCandidate:
    return worker_pb2.PrefillCandidate(
        worker_id=server.shell.config.worker_id,
        epoch=server.epoch,
        address=server.address,
        prefix_source=pulled_from,
    )


async def test_a_source_that_lost_its_pages_process_or_name_only_costs_time(model: Path, always: None) -> None:
    async with fleet(model, Role.DECODE, Role.DECODE) as (holder, puller):
        empty = await ask(puller, source(holder, puller))
        assert empty.token_ids == expected(model)
        assert pull_of(empty).problem == "the source holds 0 of 12 pages"
        for changes in ({"address": "127.0.0.1:9"}, {"epoch": 7}, {"own_address": "127.0.0.1:9"}):
            puller.shell.loop.post(puller.shell._engine.prefix_cache.clear)
            await ask(holder)
            answer = await ask(puller, source(holder, puller, **changes))
            assert answer.token_ids == expected(model)
            assert pull_of(answer).pulled_tokens == 0
            assert pull_of(answer).problem
        assert metric(puller, PULL_FAILURES.name) == metric(puller, PULLS.name) == 4


async def test_after_a_source_breaks_off_the_rest_is_computed(
    model: Path, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover_policy, "BATCH_PAGES", 4)
    send, num_sent = handover_client.HandoverClient._follow, 0

    async def fail(self: Any, *arguments: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 3:
            raise TransferError("the source is gone")
        await send(self, *arguments)

    async with fleet(model, Role.DECODE, Role.DECODE) as (holder, puller):
        await ask(holder)
        monkeypatch.setattr(handover_client.HandoverClient, "_follow", fail)
        answer = await ask(puller, source(holder, puller))
        assert answer.token_ids == expected(model)
        assert pull_of(answer).pulled_tokens == 8 * PAGE
        assert "the source is gone" in pull_of(answer).problem
        assert answer.timing is not None
        assert answer.timing.cached_tokens == 8 * PAGE


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_prompt_meets_the_pages_that_are_pulled_meanwhile(
    model: Path, role: Role, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pages arrive, then the pull hangs or breaks off, and the prompt is computed up to them."""
    monkeypatch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, 20.0, 20.0))
    monkeypatch.setattr(handover_policy, "BATCH_PAGES", 4)
    parts = {"decode": {"placement": "local" if role is Role.DECODE else "remote", "max_batch_tokens": 256}}
    async with fleet(model, Role.DECODE, role, Role.DECODE, **parts) as (holder, puller, decode):
        first = None if role is Role.DECODE else candidate(puller)
        await ask(holder, prefill=first)
        puller.shell.loop.post(puller.shell._engine.prefix_cache.clear)
        send, num_begun, hangs = handover_client.HandoverClient._follow, 0, asyncio.Event()

        def compute_now() -> None:
            (pulled,) = puller.shell.pulls._open
            pulled.plan = replace(pulled.plan, hold_s=0.0)

        async def follow(self: Any, *arguments: Any) -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun > 1:
                if breaks:
                    raise TransferError("the source is gone")
                puller.shell.loop.post(compute_now)
                await hangs.wait()
            await send(self, *arguments)

        monkeypatch.setattr(handover_client.HandoverClient, "_follow", follow)
        of = source(holder, puller)
        answer = await ask(puller, of) if role is Role.DECODE else await ask(decode, prefill=candidate(puller, of))
        assert answer.token_ids == expected(model)
        assert pull_of(answer).pulled_tokens == 4 * PAGE
        assert ("the source is gone" in pull_of(answer).problem) == breaks
        assert answer.timing is not None
        cached = answer.timing.cached_tokens if role is Role.DECODE else answer.timing.prefill_cached_tokens
        assert cached == 4 * PAGE
        await until(lambda: holder.shell.handover._num_pulls == 0)  # it has stopped sending
        assert not puller.shell._engine.prefix_cache.is_awaiting
        puller.shell._engine.prefix_cache.check_integrity()


def hold_step(server: PrefillServer, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Lets the worker's next step begin and then wait. Returns the events of its beginning and of going on."""
    engine, begun, goes_on = server.shell._engine, threading.Event(), threading.Event()
    step = engine.step

    def wait(*arguments: Any) -> Any:
        begun.set()
        goes_on.wait(TIMEOUT_S)
        return step(*arguments)

    monkeypatch.setattr(engine, "step", wait)
    return begun, goes_on


async def test_pages_arrive_while_a_prefill_worker_computes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, 20.0, 0.0))
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    async with fleet(model, *roles, decode={"placement": "remote"}) as (holder, puller, decode):
        await ask(decode, prefill=candidate(holder))
        decode.shell.loop.post(decode.shell._engine.prefix_cache.clear)
        begun, goes_on = hold_step(puller, monkeypatch)
        async with caller(decode) as to_it:
            stream = to_it.submit(PROMPT, GREEDY, [candidate(puller, source(holder, puller))])
            await until(begun.is_set)
            await until(lambda: puller.shell._engine.prefix_cache.num_cached == PULLED // PAGE)
            goes_on.set()
            answer = await to_it.answer(stream)
        assert (answer.token_ids, pull_of(answer).pulled_tokens) == (expected(model), PULLED)


async def test_a_prefill_worker_sends_pages_while_it_computes(
    model: Path, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(model, Role.PREFILL, Role.DECODE, decode={"placement": "remote"}) as (holder, puller):
        await ask(puller, prefill=candidate(holder))
        puller.shell.loop.post(puller.shell._engine.prefix_cache.clear)
        begun, goes_on = hold_step(holder, monkeypatch)
        async with caller(puller) as to_it:
            busy = to_it.submit([1, *PROMPT], GREEDY, [candidate(holder)])
            await until(begun.is_set)
            answer = await ask(puller, source(holder, puller))
            goes_on.set()
            assert (await to_it.answer(busy)).error is None
        assert (answer.token_ids, pull_of(answer).pulled_tokens) == (expected(model), PULLED)


async def test_damaged_pages_are_dropped_and_computed(
    model: Path, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(model, Role.DECODE, Role.DECODE) as (holder, puller):
        await ask(holder)
        whole = transfer_receiver.row_checksums
        damage = lambda pool, pages, rows: [1, *whole(pool, pages, rows)[1:]]  # noqa: E731
        monkeypatch.setattr(transfer_receiver, "row_checksums", damage)
        answer = await ask(puller, source(holder, puller))
        assert answer.token_ids == expected(model)
        assert "checksums differ" in pull_of(answer).problem
        assert pull_of(answer).pulled_tokens == 0


async def test_workers_that_may_not_send_or_cannot_spare_pages_report_it(model: Path, always: None) -> None:
    transfer = {"min_pull_tokens": PAGE, "max_pulls": 1}
    async with fleet(model, Role.DECODE, Role.DECODE, transfer=transfer) as (holder, puller):
        await ask(holder)
        service = holder.shell.handover
        service._num_pulls = 1
        busy = await ask(puller, source(holder, puller))
        assert "1 pulls are in flight from this worker, its limit" in pull_of(busy).problem
        service._num_pulls, service._max_pulls = 0, 0
        puller.shell.loop.post(puller.shell._engine.prefix_cache.clear)
        off = await ask(puller, source(holder, puller))
        assert "transfer.pull is off" in pull_of(off).problem
        service._max_pulls = 1
        puller.shell.loop.post(puller.shell._engine.prefix_cache.clear)
        pool = puller.shell._engine.pool
        held: list[Any] = []
        puller.shell.loop.post(lambda: held.extend(pool.allocate(pool.num_pages - 20)))
        await until(lambda: bool(held))
        part = await ask(puller, source(holder, puller))  # it can spare 12 pages fewer
        puller.shell.loop.post(lambda: pool.release(held))
        for answer in (busy, off, part):
            assert answer.token_ids == expected(model)
        assert pull_of(part).pulled_tokens == PULLED
        request = worker_pb2.SendPagesRequest(source_epoch=holder.epoch, page_hashes=[b"x" * 16] * 65537)
        async with make_channel(holder.address) as channel:
            with pytest.raises(Exception, match="page_hashes: has 65537 pages; name at most 65536"):
                await worker_pb2_grpc.PageHandoverStub(channel).SendPages(request, timeout=TIMEOUT_S)


async def test_a_prompt_is_computed_beside_a_slow_pull_and_one_without_a_request_is_stopped(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_s = [0.3]
    monkeypatch.setattr(PullCosts, "plan", lambda self, source, missing, now_s: PullPlan(0.001, 20.0, hold_s[0]))
    async with fleet(model, Role.DECODE, Role.DECODE) as (holder, puller):
        await ask(holder)
        begun, go_on = asyncio.Event(), asyncio.Event()
        client = holder.shell.handover._client
        send = client._follow

        async def wait(*arguments: Any) -> None:
            begun.set()
            await go_on.wait()
            await send(*arguments)

        monkeypatch.setattr(client, "_follow", wait)
        late = await ask(puller, source(holder, puller))
        assert late.token_ids == expected(model)
        assert (pull_of(late).pulled_tokens, pull_of(late).problem) == (0, "")
        await until(lambda: holder.shell.handover._num_pulls == 0)
        assert (metric(puller, PULL_FAILURES.name), metric(puller, PULLS_CANCELLED.name)) == (1, 0)
        puller.shell.loop.post(puller.shell._engine.prefix_cache.clear)
        hold_s[0] = 20.0
        begun.clear()
        async with caller(puller) as to_it:
            stream = to_it.submit(PROMPT, source=source(holder, puller))
            await asyncio.wait_for(begun.wait(), TIMEOUT_S)
            to_it.cancel(stream)
            await until(lambda: not puller.worker.requests and puller.shell.pulls.num_open == 0)
            await until(lambda: holder.shell.handover._num_pulls == 0)  # it has stopped sending
        assert metric(puller, PULLS_CANCELLED.name) == 1
        assert metric(puller, PULLED_PAGES.name) == 0
        go_on.set()
        again = await ask(puller, source(holder, puller))
        assert (again.token_ids, pull_of(again).pulled_tokens) == (expected(model), PULLED)


async def test_a_cancelled_prefill_stops_its_pull(model: Path, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    async with fleet(model, *roles, decode={"placement": "remote"}) as (prefill, decode, holder):
        await ask(holder, prefill=candidate(prefill))
        prefill.shell.loop.post(prefill.shell._engine.prefix_cache.clear)
        begun = asyncio.Event()

        async def wait(*arguments: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(holder.shell.handover._client, "_follow", wait)
        async with caller(decode) as to_it:
            stream = to_it.submit(PROMPT, GREEDY, [candidate(prefill, source(holder, prefill))])
            await asyncio.wait_for(begun.wait(), TIMEOUT_S)
            to_it.cancel(stream)
            await until(lambda: holder.shell.handover._num_pulls == 0)
        assert metric(prefill, PULLS_CANCELLED.name) == 1
        assert prefill.shell.pulls.num_open == 0


async def test_a_pulled_prefix_survives_preemption(model: Path, always: None) -> None:
    async with fleet(model, Role.DECODE, Role.DECODE, engine={"num_pages": 44}) as (holder, puller):
        await ask(holder)  # two such answers take 12 pages together at first, and 20 each in the end
        answers = await asyncio.gather(*(ask(puller, source(holder, puller), sampling=LONG) for _ in range(2)))
        for answer in answers:
            assert answer.token_ids == expected(model, LONG.max_tokens)
            assert pull_of(answer).pulled_tokens == PULLED
        assert sum(answer.timing.num_preemptions for answer in answers if answer.timing) > 0


async def test_a_sequence_whose_prefix_was_pulled_can_migrate(model: Path, always: None) -> None:
    async with fleet(model, Role.DECODE, Role.DECODE) as (holder, puller):
        await ask(holder)
        async with caller(puller) as to_puller, caller(holder) as to_holder, make_channel(puller.address) as channel:
            stream = to_puller.submit(PROMPT, LONG, source=source(holder, puller))
            token_ids = list((await to_puller.next_delta(stream)).token_ids)
            request = worker_pb2.MigrateRequest(worker_id="decode-0", epoch=holder.epoch, address=holder.address)
            await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=TIMEOUT_S)
            while not (delta := await to_puller.next_delta(stream)).HasField("migrated"):
                token_ids += delta.token_ids
            prompt, ticket = [*PROMPT, *token_ids], delta.migrated.ticket
            stream = to_holder.submit(prompt, LONG, num_prompt_tokens=len(PROMPT), ticket=ticket)
            answer = await to_holder.answer(stream)
        assert [*token_ids, *answer.token_ids] == expected(model, LONG.max_tokens)
        assert pull_of(answer).pulled_tokens == PULLED
