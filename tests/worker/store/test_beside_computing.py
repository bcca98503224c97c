"""Tests prompts that are computed from their beginning while their last pages are read from a shared store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.kv.page_hash import hash_pages
from penstock.types import Role
from tests.support.serving import SALT, TIMEOUT_S, Answer, caller, until
from tests.worker.store.test_shared_store import GREEDY, PAGE, PROMPT, RUN, fill, knows, model, running, sharing
from worker.pull.policy import PullCosts, PullPlan
from worker.pull.store.backends.folder_store import FolderStore

__all__ = ["model"]  # a fixture

LAST = 2  # the run at the prompt's end; it is always read
FAULTS = ["slow", "stuck", "damaged", "vanished", "failing"]
roles = pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])


class Storage:
    """Stands in for the reads of a folder: all objects but the last one suffer a fault."""

    def __init__(self, names: list[str], fault: str) -> None:
        self.names = names  # of the prompt's objects, in order
        self.is_begun, self.is_computed, self.is_over = threading.Event(), threading.Event(), threading.Event()
        self.is_late = fault in ("slow", "stuck")
        self._fault = fault
        self._get = FolderStore.get

    def get(self, store: FolderStore, name: str, max_bytes: int) -> memoryview | None:
        content, short = self._get(store, name, max_bytes), name.rpartition("/")[2]
        if short not in self.names or content is None:
            return content
        if self.names.index(short) == LAST:
            return content
        self.is_begun.wait(TIMEOUT_S)
        if self._fault == "slow":
            self.is_computed.wait(TIMEOUT_S)
        elif self._fault == "stuck":
            self.is_over.wait(TIMEOUT_S)
        elif self._fault == "damaged":
            content = memoryview(bytes(content)[:-1] + bytes([content[-1] ^ 1]))
        elif self._fault == "vanished":
            content = None
        else:
            raise OSError("stale file handle")
        return content


@contextlib.contextmanager
def storage(names: list[str], fault: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    made = Storage(names, fault)
    monkeypatch.setattr(FolderStore, "get", lambda self, name, max_bytes: made.get(self, name, max_bytes))
    try:
        yield made
    finally:
        for event in (made.is_begun, made.is_computed, made.is_over):
            event.set()


async def answer_beside(puller: Any, others: list[Any], made: Storage) -> Answer:
    """Asks for the prompt, and lets it be computed as soon as its last object has arrived, if the others are late, or
    else when the read has ended.
    """
    decode = others[0] if others else puller
    async with caller(decode) as to_it:
        stream = to_it.submit(PROMPT, GREEDY, prefill=[puller] if others else [])
        pulls, cache = puller.shell.pulls, puller.shell._engine.prefix_cache
        await until(lambda: cache.num_cached >= RUN // PAGE)

        def compute_now() -> None:
            for pull in pulls._open:
                pull.plan = replace(pull.plan, hold_s=0.0)

        if made.is_late:
            puller.shell.loop.post(compute_now)
        made.is_begun.set()
        await until(lambda: cache.num_cached >= 2 * RUN // PAGE)  # the first chunk is computed too
        made.is_computed.set()
        answer = await to_it.answer(stream)
    assert answer.error is None
    await until(lambda: pulls.num_open == 0 and not cache.is_awaiting)
    cache.check_integrity()
    return answer


@roles
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_prompt_meets_the_pages_that_the_store_delivers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, fault: str
) -> None:
    """Whatever happens to the other objects, the prompt is computed up to the last one and no token differs."""
    monkeypatch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, 20.0, 20.0))
    expected = await fill(tmp_path, model)
    reader = sharing(tmp_path, model, "reader", role, write="never")
    decode = [sharing(tmp_path / "none", model, "decode", local=False)] if role is Role.PREFILL else []
    async with running(reader, *decode) as [puller, *others]:
        await knows(puller, 3)
        names = [page.hex() for page in hash_pages(PROMPT, PAGE, SALT)[RUN // PAGE - 1 :: RUN // PAGE]]
        with storage(names, fault, monkeypatch) as made:
            answer = await answer_beside(puller, others, made)
    assert answer.token_ids == expected
    timing = answer.timing
    assert timing is not None
    assert timing.pull.source == "shared store"
    num_cached = timing.prefill_cached_tokens if others else timing.cached_tokens
    assert RUN <= num_cached <= timing.pull.pulled_tokens
    assert fault == "slow" or timing.pull.pulled_tokens == RUN
    problem = {"damaged": "an object ", "vanished": "an object is no longer", "failing": "the shared store failed"}
    assert problem.get(fault, "") in timing.pull.problem
