"""Tests that a router checks grammars for a bounded time, without delaying other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.attack.attacks.grammars import CHEAP, HOSTILE
from penstock.errors import CheckpointError, InternalError, InvalidInput
from penstock.text.grammars import MAX_SOURCE_BYTES
from penstock.types import Grammar
from router.text.grammar_check import GrammarCheck, GrammarLimits
from tests.support.engine.grammars import MODEL, VOCAB_SIZE, hostile, regex
from tests.support.router.router_fakes import FakeWorker, running_router

WAIT_S = 30.0


@pytest.fixture(name="check")
def _check() -> Iterator[GrammarCheck]:
    made = GrammarCheck(MODEL, VOCAB_SIZE, 1 << 20)
    yield made
    made.close()


async def test_compilable_grammars_pass_and_others_are_refused(check: GrammarCheck) -> None:
    for _ in range(2):
        await check.check(regex("a+"), "tenant")
        with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be enforced: .*look-around"):
            await check.check(regex("(?=a)"), "tenant")
    with pytest.raises(InvalidInput, match=r"sampling\.grammar: has more than 131072 bytes; shorten it"):
        await check.check(regex("a" * (MAX_SOURCE_BYTES + 1)), "tenant")


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - CHEAP))
async def test_a_hostile_grammar_is_refused_within_its_processor_time_and_remembered(
    check: GrammarCheck, name: str
) -> None:
    check.start()
    await check.check(regex("a+"), "tenant")
    assert check._process is not None
    process = psutil.Process(check._process.pid)
    before_s = compiled_s(process)
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"sampling\.grammar: "):
            await check.check(hostile(name), "tenant")  # the second refusal does not use the process
    await check.check(regex("b+"), "tenant")  # the next grammar is checked
    assert process.is_running()
    assert compiled_s(process) - before_s < 4 * GrammarLimits().max_cpu_s  # the kernel counts processor time in ticks


def compiled_s(process: psutil.Process) -> float:
    """Returns the processor time of all forks that have compiled."""
    times = process.cpu_times()
    return float(times.children_user + times.children_system)


async def test_an_ended_process_is_replaced(check: GrammarCheck) -> None:
    await check.check(regex("a+"), "tenant")
    assert check._process is not None
    check._process.kill()
    check._process.wait(WAIT_S)
    with pytest.raises(InternalError, match="the process that compiles grammars ended with status -9"):
        await check.check(regex("b+"), "tenant")
    await check.check(regex("b+"), "tenant")


async def test_unknown_tokens_are_refused_by_name(tmp_path: Path) -> None:
    check = GrammarCheck(tmp_path, VOCAB_SIZE, 1 << 20)
    try:
        check.start()
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing"):
            await check.check(regex("a"), "tenant")
    finally:
        check.close()


async def test_other_requests_are_served_while_a_grammar_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released, compile_it = threading.Event(), threading.Event(), GrammarCheck._compile

    def compile_slowly(check: GrammarCheck, grammar: Grammar) -> str | None:
        begun.set()
        assert released.wait(WAIT_S)
        return compile_it(check, grammar)

    monkeypatch.setattr(GrammarCheck, "_compile", compile_slowly)
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as client:
            plain = {"prompt": "a", "max_tokens": 3}
            slow = asyncio.create_task(client.post("/v1/completions", json=plain | {"regex": "a+"}))
            await asyncio.to_thread(begun.wait, WAIT_S)
            for _ in range(5):
                assert (await client.post("/v1/completions", json=plain)).status_code == 200
            assert not slow.done()
            released.set()
            assert (await slow).status_code == 200
    assert len(worker.submits) == 6
