"""Tests requests that change or lose their worker while their pages come from a shared store: no token differs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decode_worker.server import DecodeServer
from penstock.metrics.worker_metrics import PREEMPTIONS, STORE_READ_PAGES
from penstock.types import Role, SamplingParams
from tests.decode_worker.migrate.test_migration import Router, migrate, until_running
from tests.support.serving import caller, until
from tests.worker.store.test_shared_store import (
    PAGE,
    PROMPT,
    RUN,
    always,
    ask,
    fill,
    knows,
    metric,
    model,
    running,
    sharing,
    stored,
)

__all__ = ["always", "model"]  # fixtures

LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=400, temperature=0.9, seed=5, ignore_eos=True)
both = pytest.mark.parametrize("sampling", [LONG, SEEDED], ids=["greedy", "seeded"])


async def whole_answer(model: Path, folder: Path, sampling: SamplingParams) -> list[int]:
    """Returns the answer of a worker that reads no page from a store."""
    async with running(sharing(folder / "none", model, "alone", write="never")) as [alone], caller(alone) as router:
        return (await router.answer(router.submit(PROMPT, sampling))).token_ids


@both
async def test_a_prompt_from_the_store_is_handed_to_its_decode_worker(
    model: Path, tmp_path: Path, sampling: SamplingParams
) -> None:
    expected = await whole_answer(model, tmp_path, sampling)
    await fill(tmp_path / "kv", model)
    configs = [sharing(tmp_path / "kv", model, role.value, role, local=False) for role in (Role.PREFILL, Role.DECODE)]
    async with running(*configs) as [prefill, decode], caller(decode) as router:
        await knows(prefill, 3)
        answer = await router.answer(router.submit(PROMPT, sampling, [prefill]))
    assert answer.token_ids == expected
    assert answer.timing is not None
    assert (answer.timing.prefill_cached_tokens, answer.timing.pull.source) == (3 * RUN, "shared store")


@both
async def test_a_sequence_whose_prompt_came_from_the_store_migrates(
    model: Path, tmp_path: Path, sampling: SamplingParams
) -> None:
    expected = await whole_answer(model, tmp_path, sampling)
    await fill(tmp_path / "kv", model)
    left, right = (sharing(tmp_path / "kv", model, name) for name in ("left", "right"))
    async with running(left, right) as [source, target], caller(source) as to_source, caller(target) as to_target:
        await knows(source, 3)
        router = Router({source.epoch: to_source, target.epoch: to_target})
        stream = asyncio.create_task(router.stream(source, PROMPT, sampling))
        await until_running(source, 1)
        response = await migrate(source, target)
        seen = await stream
        assert len(response.migrated) == 1, response
        assert metric(source, STORE_READ_PAGES.name) == 3 * RUN / PAGE
    assert (seen.error, seen.num_migrations, seen.token_ids) == (None, 1, expected)


@both
async def test_a_lost_workers_request_continues_with_what_it_has_stored(
    model: Path, tmp_path: Path, sampling: SamplingParams
) -> None:
    """The second half of the answer is computed over pages of the prompt and of the first half, from the store."""
    expected = await whole_answer(model, tmp_path, sampling)
    so_far = [*PROMPT, *expected[: 2 * RUN - 140]]
    async with running(sharing(tmp_path / "kv", model, "lost")) as [lost], caller(lost) as router:
        half = SamplingParams(**{**_fields(sampling), "max_tokens": len(so_far) - len(PROMPT) + 1})
        answer = await router.answer(router.submit(PROMPT, half))
        assert answer.token_ids[:-1] == so_far[len(PROMPT) :]
        await stored(lost, len(so_far) // RUN)
    async with running(sharing(tmp_path / "kv", model, "next")) as [server], caller(server) as router:
        await knows(server, len(so_far) // RUN)
        stream = router.submit(so_far, sampling, num_prompt_tokens=len(PROMPT))
        answer = await router.answer(stream)
        assert metric(server, STORE_READ_PAGES.name) == len(so_far) // RUN * RUN / PAGE
    assert answer.token_ids == expected[len(so_far) - len(PROMPT) :]
    assert answer.timing is not None
    assert answer.timing.cached_tokens == len(so_far) // RUN * RUN


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


@both
async def test_a_preempted_sequence_resumes_from_the_store(
    model: Path, tmp_path: Path, sampling: SamplingParams
) -> None:
    """The pool holds two prompts but not two whole sequences, so one of them is preempted and resumed later."""
    other = [1, *PROMPT[1:]]
    expected = await whole_answer(model, tmp_path, sampling)
    async with running(sharing(tmp_path / "kv", model, "first")) as [first]:
        await ask(first)
        await ask(first, other)
        await stored(first, 6)
    config = sharing(tmp_path / "kv", model, "small")
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"num_pages": 130})})
    async with running(config) as [server], caller(server) as router:
        await knows(server, 6)
        streams = [router.submit(prompt, sampling) for prompt in (PROMPT, other)]
        answers = [await router.answer(stream) for stream in streams]
        assert metric(server, PREEMPTIONS.name) > 0
        assert metric(server, STORE_READ_PAGES.name) >= 6 * RUN / PAGE
    assert [answer.error for answer in answers] == [None, None]
    assert answers[0].token_ids == expected


async def test_a_request_cancelled_during_a_store_read_holds_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path, model)
    async with running(sharing(tmp_path, model, "second")) as [second], caller(second) as router:
        await knows(second, 3)
        goes_on = _hold_reads(second, monkeypatch)
        stream = router.submit(PROMPT, LONG)
        await until(lambda: second.shell.pulls.num_open == 1)
        router.cancel(stream)
        goes_on()
        await until(lambda: second.shell.pulls.num_open == 0)
        await until(lambda: not second.worker.requests)


def _hold_reads(server: DecodeServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks reads until the returned function is called."""
    threads = server.shell._shared._threads  # type: ignore[union-attr]
    held: list[Any] = []
    read = threads.read
    monkeypatch.setattr(threads, "read", held.append)

    def go_on() -> None:
        monkeypatch.setattr(threads, "read", read)
        server.shell.loop.post(lambda: [read(reader) for reader in held])

    return go_on


async def test_a_hanging_store_delays_a_prompt_by_its_limit_and_no_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one prompt waits for the store, another is answered; then the first is computed."""
    expected = await whole_answer(model, tmp_path, LONG)
    await fill(tmp_path / "kv", model)
    async with running(sharing(tmp_path / "kv", model, "second")) as [second], caller(second) as router:
        await knows(second, 3)
        _hold_reads(second, monkeypatch)
        patient = router.submit(PROMPT, LONG)
        await until(lambda: second.shell.pulls.num_open == 1)
        other = await router.answer(router.submit([1, *PROMPT[:300]], LONG))
        assert other.error is None
        assert second.shell.pulls.num_open == 1
        [reading] = second.shell._shared._readings
        second.shell.loop.post(lambda: setattr(reading, "deadline_s", 0.0))  # its time limit has passed
        answer = await router.answer(patient)
    assert answer.token_ids == expected
    assert answer.timing is not None
    assert "the shared store did not deliver the pages in time" in answer.timing.pull.problem
