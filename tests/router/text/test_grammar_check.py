"""Tests that a router checks grammars without anybody else waiting, and for a bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest

from penstock.errors import InvalidInput
from penstock.text.grammars import MAX_SOURCE_BYTES, GrammarCompiler
from penstock.types import Grammar
from router.text import grammar_check
from router.text.grammar_check import GrammarCheck
from tests.support.engine.grammars import MODEL, VOCAB_SIZE, regex
from tests.support.router.router_fakes import FakeWorker, running_router

WAIT_S = 30.0


@pytest.fixture(name="check")
def _check() -> Iterator[GrammarCheck]:
    made = GrammarCheck(MODEL, VOCAB_SIZE, 1 << 20)
    yield made
    made.close()


async def test_what_compiles_passes_and_the_rest_is_named(check: GrammarCheck) -> None:
    for _ in range(2):
        await check.check(regex("a+"), "tenant")
        with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be obeyed: .*look-around"):
            await check.check(regex("(?=a)"), "tenant")
    with pytest.raises(InvalidInput, match=r"sampling\.grammar: has more than 131072 bytes; shorten it"):
        await check.check(regex("a" * (MAX_SOURCE_BYTES + 1)), "tenant")


async def test_a_grammar_that_compiles_for_too_long_is_refused(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(grammar_check, "_MAX_COMPILE_S", 0.01)
    monkeypatch.setattr(GrammarCompiler, "compile", lambda compiler, grammar: released.wait(WAIT_S))
    with pytest.raises(InvalidInput, match=r"takes more than 0\.01 s to compile; simplify it"):
        await check.check(regex("a+"), "tenant")
    released.set()


async def test_other_requests_are_served_while_a_grammar_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released, compile_it = threading.Event(), threading.Event(), GrammarCompiler.compile

    def compile_slowly(compiler: GrammarCompiler, grammar: Grammar) -> object:
        begun.set()
        assert released.wait(WAIT_S)
        return compile_it(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
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
