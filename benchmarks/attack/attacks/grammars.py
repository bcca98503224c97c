"""Attacks by the form that an output must have: grammars whose automata explode, and floods of tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from benchmarks.attack.attacks.messages import CHAT, send_http
from benchmarks.attack.sockets import http_request, post
from benchmarks.attack.target import AttackTarget
from benchmarks.attack.verdict import Breach

_DEADLINE_EXCEEDED = 504


def _fields(count: int, value: object) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{number}": value for number in range(count)}}


# Each entry is a field of a completion's body and its value, by name. Within the grammar library's own limits each
# takes 0.1 to 10 s of a core to compile or to compute a token, or memory without end.
HOSTILE: Mapping[str, tuple[str, object]] = {
    "doubling": ("guided_grammar", "start: A\nA: " + " & ".join(f"/(.*x.*){{{count}}}/" for count in range(1, 10))),
    "negations": (
        "guided_grammar",
        "start: A\nA: " + " & ".join(f"~/(.*{letter}.{{{gap}}})/" for gap, letter in enumerate("abcdefghij", 3)),
    ),
    "repetitions": ("guided_grammar", 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"{1000}'),
    "product": ("guided_json", {"allOf": [{"anyOf": [_fields(6, {"const": a})] * 6} for a in range(8)]}),
    "multiples": ("guided_json", {"allOf": [{"type": "integer", "multipleOf": value} for value in (97, 89, 83)]}),
    "many multiples": (
        "guided_json",
        {"anyOf": [{"type": "integer", "multipleOf": 900 + each} for each in range(200)]},
    ),
    "many fields": ("guided_json", _fields(3000, {"type": "string"})),
    "formats": ("guided_json", _fields(1000, {"type": "string", "format": "date-time"})),
    "power": ("guided_regex", "(a{1000}){1000}"),
    "optional classes": ("guided_regex", "".join(f"[^\\x{code:02x}]*" for code in range(32, 127)) * 5),
    "choices": ("guided_choice", [f"{number:09d}" for number in range(9000)]),
}
# These may be accepted: only a later token is costly, and workers limit it.
CHEAP = {"power", "repetitions"}


async def hostile_grammars(target: AttackTarget) -> None:
    """Sends grammars whose automata explode, each in several variants, and schemas as large as they may be."""
    bodies = [_body(field, value, rank) for rank in range(4) for field, value in HOSTILE.values()]
    head = post("/v1/completions", target.key)
    for status, answer in await asyncio.gather(*(http_request(target.http, head, body) for body in bodies)):
        # Some may be accepted; others wait behind each other until their own deadline.
        if not 200 <= status < 500 and status != _DEADLINE_EXCEEDED:
            raise Breach(f"a grammar was answered {status}: {answer[-200:]!r}")


def _body(field: str, value: object, rank: int) -> bytes:
    """Returns a request for an output of the grammar in one of its variants, which no cache knows yet."""
    match value:
        case dict():
            value = {**value, "title": f"{rank}"}
        case list():
            value = [*value, f"{rank}"]
        case str():
            value = f"{value}\n// {rank}" if field == "guided_grammar" else f"{value}{rank}"
    return json.dumps({"prompt": "x", "max_tokens": 1, field: value}).encode()


async def floods_of_tools(target: AttackTarget) -> None:
    """Sends chats with thousands of tools, with schemas of megabytes, and with names that no tool may have."""

    def chat(tools: list[object]) -> bytes:
        return (CHAT + '"max_tokens":1,"tools":' + json.dumps(tools) + "}").encode()

    def tool(name: str, parameters: object) -> object:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    deep: object = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    await send_http(
        target,
        "/v1/chat/completions",
        chat([tool(f"t{number}", {}) for number in range(50_000)]),
        chat([tool("t", {"enum": ["x" * 1000] * 4000})]),
        chat([tool("t" * 100_000, {})]),
        chat([tool("t", deep)] * 400),
        chat([{}] * 100_000),
    )


ATTACKS = (hostile_grammars, floods_of_tools)
