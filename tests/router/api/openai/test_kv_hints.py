"""Tests KV hints in HTTP bodies: every form becomes one object, and bad values are refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import LimitsConfig
from penstock.errors import InvalidInput
from penstock.kv.kv_hints import Hint, HintAnswer, HintOutcome, KvHints
from penstock.rpc.hints import read_hints
from penstock.text.completions import Output
from penstock.v1 import common_pb2
from penstock.wire import hint_answer_to_wire, kv_hints_from_wire
from router.api.openai.kv_hints import answers_json, longest_ttl_s
from router.api.openai.requests import CompletionBody, validate_body


def hints_of(**fields: Any) -> KvHints:
    body = validate_body(CompletionBody, {"prompt": "a", **fields}, LimitsConfig())
    [request] = body.requests("r")
    return kv_hints_from_wire(request.kv_hints)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, KvHints()),
        ({"kv_hints": {"session": "s", "pin_s": 30, "priority": 2}}, KvHints(session="s", pin_s=30.0, priority=2)),
        ({"kv_hints": {"session": "s", "end_session": True, "only": True}}, KvHints("s", end_session=True, only=True)),
        ({"session_id": "s"}, KvHints(session="s")),
        ({"prompt_cache_key": "key", "user": "u"}, KvHints()),  # neither identifies one conversation
        ({"prompt_cache_retention": "24h"}, KvHints(pin_s=86_400.0)),
        ({"prompt_cache_retention": "in_memory"}, KvHints()),
        ({"nvext": {"agent_hints": {"priority": 50, "osl": 10}}}, KvHints(priority=9)),
        ({"nvext": {"agent_hints": {"priority": -3}}}, KvHints()),
        ({"nvext": {"agent_hints": {"speculative_prefill": True}}}, KvHints(prefetch_s=0.0)),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}}, KvHints(pin_s=300.0)),
        ({"kv_hints": {"pin_s": 10}, "nvext": {"cache_control": {"ttl": "1h"}}}, KvHints(pin_s=3600.0)),
    ],
)
def test_every_form_becomes_one_object(fields: dict[str, Any], expected: KvHints) -> None:
    assert hints_of(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_hints": {"pin": 3}}, r"kv_hints\.pin"),
        ({"kv_hints": {"pin_s": -1}}, r"kv_hints\.pin_s: is -1.0; give 0 to 86400 seconds"),
        ({"kv_hints": {"session": "\ud800"}}, r"kv_hints\.session: has half of a surrogate pair"),
        ({"nvext": {"agent_hints": {"priority": float("nan")}}}, r"nvext\.agent_hints\.priority: is NaN"),
        ({"kv_hints": {"priority": 10}}, r"kv_hints\.priority: is 10; give 0 to 9"),
        ({"kv_hints": {"session": "s" * 257}}, r"kv_hints\.session: has 257 characters; give 256 or fewer"),
        ({"kv_hints": {"demote": True, "pin_s": 3}}, r"kv_hints\.demote: contradicts pin_s and priority"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention: is '1y'; give in_memory or 24h"),
        (
            {"nvext": {"cache_control": {"ttl": "soon"}}},
            r"nvext\.cache_control\.ttl: is 'soon'; give a number",
        ),
        ({"nvext": {"greed_sampling": True}}, r"nvext\.greed_sampling"),
    ],
)
def test_a_bad_hint_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        hints_of(**fields)


def test_a_hint_that_needs_a_session_can_get_its_name_from_a_header() -> None:
    hints = hints_of(kv_hints={"end_session": True})
    with pytest.raises(InvalidInput, match=r"kv_hints\.end_session: needs a session; name it in kv_hints\.session or"):
        hints.check_session()
    for header in ("x-penstock-session", "x-session-id", "x-dynamo-session-id"):
        found = read_hints({header: "s"}, user="u")
        assert (found.session, found.conversation) == ("s", "s")
    assert read_hints({}, user="u").conversation == ""


def test_the_longest_ttl_of_a_messages_body_is_used() -> None:
    mark = {"type": "ephemeral", "ttl": "5m"}
    body = {
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "b", "cache_control": mark}]}],
        "tools": [{"name": "t", "cache_control": {"type": "ephemeral"}}],
    }
    assert longest_ttl_s(body) == 3600.0
    assert longest_ttl_s({"messages": [{"role": "user", "content": "b"}], "system": "a"}) == 0.0
    with pytest.raises(InvalidInput, match=r"cache_control\.ttl: is 5; give a number and a unit"):
        longest_ttl_s({"cache_control": {"ttl": 5}})


def test_hint_answers_are_shown_unless_only_a_session_was_given() -> None:
    def shown(*answers: HintAnswer) -> list[dict[str, Any]]:
        timing = common_pb2.Timing(hints=[hint_answer_to_wire(answer) for answer in answers])
        return answers_json(Output(0, "", [], timing=timing))

    session = HintAnswer(Hint.SESSION, HintOutcome.ACCEPTED, num_pages=2, worker_id="d0")
    clipped = HintAnswer(Hint.PIN, HintOutcome.CLIPPED, "the quota", 1, "d0")
    assert shown(session) == []
    assert shown(session, clipped) == [
        {"hint": "session", "outcome": "accepted", "pages": 2, "worker": "d0"},
        {"hint": "pin_s", "outcome": "clipped", "pages": 1, "worker": "d0", "reason": "the quota"},
    ]
