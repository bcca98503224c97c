"""Reads KV hints from HTTP bodies, in every form that clients send, and reports the outcome of each hint. Pure.

The forms are our own `kv_hints`, OpenAI's `prompt_cache_retention`, Anthropic's `cache_control` with a `ttl`, and
Dynamo's `nvext` with `agent_hints` and `cache_control`. docs/kv-hints.md has the table. `penstock.rpc.hints` reads
session names from headers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, StrictBool

from penstock.errors import InvalidInput
from penstock.kv.kv_hints import MAX_PRIORITY, Hint, HintOutcome, KvHints
from penstock.text.completions import Output
from penstock.wire import hint_outcome_from_wire
from router.api.dialect import Json
from router.api.openai.json_bodies import Integer, Number

_DAY_S = 86_400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TTL = re.compile(r"(\d{1,5})([smh])")


class KvHintsFields(BaseModel):
    """Declares the object `kv_hints` of a body."""

    model_config = ConfigDict(extra="forbid")

    session: str = ""
    fork_of: str = ""
    pin_s: Number = 0.0
    priority: Integer = 0
    demote: StrictBool = False
    prefetch_s: Number | None = None
    end_session: StrictBool = False
    only: StrictBool = False


class AgentHints(BaseModel):
    """Declares Dynamo's `nvext.agent_hints`. Its hints about queueing and output length are accepted but unused."""

    model_config = ConfigDict(extra="forbid")

    priority: Number | None = None
    strict_priority: Number | None = None
    latency_sensitivity: Number | None = None
    osl: Integer | None = None
    speculative_prefill: StrictBool | None = None


class CacheControl(BaseModel):
    """Declares a marker that says for how long to keep a prompt's pages."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | None = None


class DynamoExtension(BaseModel):
    """Declares the supported fields of the object `nvext` of a body."""

    model_config = ConfigDict(extra="forbid")

    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


def combined_hints(
    own: KvHintsFields | None, nvext: DynamoExtension | None, retention: str | None, session: str
) -> KvHints:
    """Returns the combined hints of all forms in a body; of two times or priorities, the larger wins.

    `retention` is OpenAI's `prompt_cache_retention`. `session` names the session unless `kv_hints` does. Raises
    InvalidInput.
    """
    own = own or KvHintsFields()
    pin_s, priority, prefetch_s = own.pin_s, own.priority, own.prefetch_s
    if retention not in (None, "in_memory", "in-memory", "24h"):
        raise InvalidInput("prompt_cache_retention", f"is {retention!r:.40}; give in_memory or 24h")
    if retention == "24h":
        pin_s = max(pin_s, _DAY_S)
    agent = nvext.agent_hints if nvext is not None else None
    if agent is not None and agent.priority is not None:
        if math.isnan(agent.priority):
            raise InvalidInput("nvext.agent_hints.priority", "is NaN; give a number")
        priority = max(priority, int(min(max(agent.priority, 0.0), float(MAX_PRIORITY))))
    if agent is not None and agent.speculative_prefill and prefetch_s is None:
        prefetch_s = 0.0
    control = nvext.cache_control if nvext is not None else None
    if control is not None and control.ttl is not None:
        pin_s = max(pin_s, ttl_s(control.ttl, "nvext.cache_control.ttl"))
    hints = KvHints(
        own.session or session, own.fork_of, pin_s, priority, own.demote, prefetch_s, own.end_session, own.only
    )
    hints.check()
    return hints


def ttl_s(ttl: object, field: str) -> float:
    """Returns the seconds of a time such as 5m or 1h. Raises InvalidInput."""
    match = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if match is None:
        raise InvalidInput(field, f"is {ttl!r:.40}; give a number and a unit, such as 300s, 5m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def longest_ttl_s(body: Mapping[str, Any]) -> float:
    """Returns the longest `ttl` of the `cache_control` markers in a body of Anthropic's Messages; 0 if there is none.

    Raises InvalidInput for an invalid `ttl`. Skips fields of a wrong type, which the reader of the body reports.
    """
    longest_s = 0.0
    for each in _markable(body):
        control = each.get("cache_control")
        if isinstance(control, Mapping) and control.get("ttl") is not None:
            longest_s = max(longest_s, ttl_s(control["ttl"], "cache_control.ttl"))
    return longest_s


def _markable(body: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yields the objects of a body that may have a marker."""
    yield body
    lists = [body.get("system"), body.get("tools")]
    messages = body.get("messages")
    if isinstance(messages, list):
        lists += [message.get("content") for message in messages if isinstance(message, Mapping)]
    for found in lists:
        if isinstance(found, list):
            yield from (each for each in found if isinstance(each, Mapping))


def answers_json(output: Output) -> list[Json]:
    """Returns the outcome of each hint of an ended completion; nothing if it only named a session, with success."""
    if output.timing is None:
        return []
    answers = []
    for answer in output.timing.hints:
        outcome = hint_outcome_from_wire(answer.outcome)
        reason = {"reason": answer.reason} if answer.reason else {}
        answers.append(
            {"hint": answer.hint, "outcome": outcome.value, "pages": answer.pages, "worker": answer.worker_id, **reason}
        )
    is_plain = all(each["hint"] == Hint.SESSION and each["outcome"] == HintOutcome.ACCEPTED for each in answers)
    return [] if is_plain else answers
