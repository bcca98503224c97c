"""Tests hints at real workers: answered at the worker, held within quotas, prefetched, and kept through every
hand-off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_worker.server import DecodeServer
from penstock.kv.kv_hints import Hint, HintAnswer, HintOutcome, KvHints
from penstock.metrics.worker_metrics import HELD_PAGES, HINTS_ACCEPTED, PREFETCHED_PAGES
from penstock.scheduling import bulk_lane
from penstock.types import FinishReason, Lane, Role
from penstock.wire import finish_reason_from_wire, hint_answer_from_wire
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, caller, until, worker_config, workers
from worker.hints.prefetches import Prefetch, PrefetchQueue

PAGE = 16
PROMPT = [(5 * i) % 300 + 2 for i in range(6 * PAGE + 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def answers_of(timing: Any) -> dict[tuple[str, Hint], HintAnswer]:
    found = map(hint_answer_from_wire, timing.hints)
    return {(answer.worker_id, answer.hint): answer for answer in found}


def metric(server: DecodeServer | PrefillServer, name: str) -> float:
    return server.shell.hints.values()[name]


PINNED = KvHints(session="s", pin_s=60.0, priority=4)


async def test_hints_are_answered_at_every_worker_that_they_reach(model: Path) -> None:
    configs = [
        worker_config(Role.PREFILL, model, "p"),
        worker_config(Role.DECODE, model, "d", decode={"placement": "remote"}),
    ]
    async with workers(*configs) as (prefill, decode), caller(decode) as router:
        answer = await router.answer(router.submit(PROMPT, prefill=[prefill], kv_hints=PINNED, tenant="t"))
        answers = answers_of(answer.timing)
        assert {hint for worker, hint in answers if worker == "d"} == {Hint.SESSION, Hint.PIN, Hint.PRIORITY}
        assert answers["p", Hint.PIN] == HintAnswer(Hint.PIN, HintOutcome.ACCEPTED, num_pages=6, worker_id="p")
        assert answers["d", Hint.PIN].outcome is HintOutcome.ACCEPTED
        for server in (prefill, decode):
            assert metric(server, HELD_PAGES.name) >= 6
            assert dict(server.shell.hints.held_by_tenant()) == {"t": metric(server, HELD_PAGES.name)}
        assert metric(decode, HINTS_ACCEPTED.name) == 3
        plain = await router.answer(router.submit(PROMPT, prefill=[prefill]))
        assert plain.token_ids == answer.token_ids
        assert not plain.timing.hints


async def test_a_request_of_hints_alone_generates_nothing_and_ends_the_session(model: Path) -> None:
    async with workers(worker_config(Role.DECODE, model, "d")) as (decode,), caller(decode) as router:
        await router.answer(router.submit(PROMPT, kv_hints=PINNED, tenant="t"))
        held = metric(decode, HELD_PAGES.name)
        other = KvHints(session="s", end_session=True, only=True)
        ended = await router.answer(router.submit(PROMPT, kv_hints=other, tenant="u"))
        assert metric(decode, HELD_PAGES.name) == held, "another tenant's session of the same name"
        ended = await router.answer(router.submit(PROMPT, kv_hints=other, tenant="t"))
        assert ended.timing.decode_first_token_ms == ended.timing.first_token_ms == 0
        assert (ended.token_ids, finish_reason_from_wire(ended.finish_reason)) == ([], FinishReason.STOP)
        assert answers_of(ended.timing)["d", Hint.END].outcome is HintOutcome.ACCEPTED
        assert metric(decode, HELD_PAGES.name) == 0


async def test_a_prefetch_loads_pages_before_the_next_turn(model: Path) -> None:
    engine = {"num_pages": 32, "host_memory_bytes": 64 << 20}
    config = worker_config(Role.DECODE, model, "d", engine=engine)
    async with workers(config) as (decode,), caller(decode) as router:
        first = await router.answer(router.submit(PROMPT))
        flood = [(11 * i) % 300 + 2 for i in range(26 * PAGE)]
        await router.answer(router.submit(flood, replace(GREEDY, max_tokens=4)))
        hint = KvHints(prefetch_s=0.0, only=True)
        answered = await router.answer(router.submit(PROMPT, kv_hints=hint))
        assert answers_of(answered.timing)["d", Hint.PREFETCH].outcome is HintOutcome.ACCEPTED
        await until(lambda: metric(decode, PREFETCHED_PAGES.name) > 0)
        assert (await router.answer(router.submit(PROMPT))).token_ids == first.token_ids
        decode.shell.replica.engine.prefix_cache.check_integrity()


async def test_without_lower_tiers_a_prefetch_is_refused(model: Path) -> None:
    async with workers(worker_config(Role.DECODE, model, "d")) as (decode,), caller(decode) as router:
        answered = await router.answer(router.submit(PROMPT, kv_hints=KvHints(prefetch_s=1.0)))
        answer = answers_of(answered.timing)["d", Hint.PREFETCH]
        assert answer.outcome is HintOutcome.REFUSED
        assert "keeps no evicted pages" in answer.reason


def test_prefetches_wait_in_order_and_no_tenant_takes_every_place() -> None:
    queue = PrefetchQueue(4)
    add: Callable[[str, float], bool] = lambda tenant, due_s: queue.add(Prefetch(tenant, []), due_s)  # noqa: E731
    assert [add("a", 3.0), add("a", 1.0), add("a", 0.0)] == [True, True, False]
    assert [add("b", 2.0), add("c", 5.0), add("c", 0.0)] == [True, True, False]
    assert queue.take_due(0.5) is None
    taken = [queue.take_due(9.0) for _ in range(5)]
    assert [prefetch.tenant if prefetch else None for prefetch in taken] == ["a", "b", "a", "c", None]
    assert add("a", 0.0)


async def test_bulk_requests_evict_each_others_pages_before_those_of_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_lane, "_MOST_RESTS", 0.0)  # so that they do not take long

    def flood(step: int) -> list[int]:
        return [(step * i) % 300 + 2 for i in range(20 * PAGE + 3)]

    config = worker_config(Role.DECODE, model, "d", engine={"num_pages": 32})
    async with workers(config) as (decode,), caller(decode) as router:
        await router.answer(router.submit(PROMPT))
        for step in (7, 11, 13):
            await router.answer(router.submit(flood(step), replace(GREEDY, max_tokens=2), lane=Lane.BULK))
        assert (await router.answer(router.submit(PROMPT))).timing.decode_cached_tokens == 6 * PAGE
        shared = await router.answer(router.submit([*PROMPT, 5, 6, 7], replace(GREEDY, max_tokens=20), lane=Lane.BULK))
        assert shared.timing.decode_cached_tokens == 6 * PAGE
        await router.answer(router.submit(flood(17), replace(GREEDY, max_tokens=2), lane=Lane.BULK))
        assert (await router.answer(router.submit(PROMPT))).timing.decode_cached_tokens == 6 * PAGE, (
            "only its own pages"
        )
