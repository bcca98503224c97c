"""Sends the costliest bodies of several sizes to the translated dialects: none may stop the event loop."""

from __future__ import annotations

import functools

import pytest

from penstock.config import StoreConfig
from penstock.config.limits import LimitsConfig
from penstock.process.setup import freeze_heap
from router.api.openai.json_bodies import SMALL_BODY_BYTES
from router.api.translation.anthropic.requests import read_message_call
from router.api.translation.responses.requests import read_response_call
from router.api.translation.responses.store import ResponseStore
from tests.router.api.bounds.test_bounded_cost import LARGEST, MEDIUM, client_of, filled, keyed
from tests.support.router.loop_pauses import MAX_PAUSE_S, bounded_pauses, longest_call_s
from tests.support.router.router_fakes import FakeWorker, running_router

MESSAGES = '{"max_tokens":9,"messages":['
BODIES = {
    "empty messages": ("messages", filled, MESSAGES, "{}", "]}"),
    "empty blocks": ("messages", filled, MESSAGES + '{"role":"user","content":[', "{}", "]}]}"),
    "many blocks, then a bad one": (
        *("messages", filled, MESSAGES + '{"role":"user","content":['),
        *('{"type":"text","text":""}', ",{}]}]}"),
    ),
    "many calls": (
        *("messages", filled, MESSAGES + '{"role":"assistant","content":['),
        *('{"type":"tool_use","id":"a","name":"b","input":{}}', "]}]}"),
    ),
    "empty tools": ("messages", filled, '{"max_tokens":9,"tools":[', "{}", "]}"),
    "numbers as stop sequences": ("messages", filled, '{"max_tokens":9,"stop_sequences":[', "0", "]}"),
    "many unknown fields": ("messages", keyed, '{"max_tokens":9,"messages":[{}],', "[]", "}"),
    "empty items": ("responses", filled, '{"input":[', "{}", "]}"),
    "empty parts": ("responses", filled, '{"input":[{"role":"user","content":[', "{}", "]}]}"),
    "much metadata": ("responses", keyed, '{"input":"a","metadata":{', "0", "}}"),
    "many inclusions": ("responses", filled, '{"input":"a","include":[', '""', "]}"),
    "many functions": ("responses", filled, '{"input":"a","tools":[', '{"type":"function","name":"a"}', "]}"),
}


@pytest.fixture(name="post")
async def _post():
    async with running_router(await FakeWorker().start()) as router:
        with client_of(router) as post:
            for path in ("messages", "responses"):  # the first call imports and compiles
                assert (await post(f"/v1/{path}", content=b"[")).status_code == 400
            freeze_heap()  # as a router's process does; the heap of the tests stays frozen
            yield post


@pytest.mark.parametrize("size", [SMALL_BODY_BYTES, MEDIUM, LARGEST])
async def test_no_body_stops_the_event_loop(post, size):
    for case, (path, fill, *parts) in BODIES.items():
        body = fill(*parts, size)
        with bounded_pauses(case):
            answer = await post(f"/v1/{path}", content=body)
        assert answer.status_code == 400, (case, answer.text[:300])
        assert len(answer.content) < 1000, case


def test_no_step_of_reading_a_body_holds_the_lock_for_long():
    limits, store = LimitsConfig(), ResponseStore(StoreConfig(), lambda: 0.0)
    for case, (path, fill, *parts) in BODIES.items():
        body = fill(*parts, LARGEST)
        read = functools.partial(read_message_call, body, limits)
        if path == "responses":
            read = functools.partial(read_response_call, body, limits, "", store)
        assert longest_call_s(read) < MAX_PAUSE_S, case
