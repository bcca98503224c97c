"""Compares what a token costs a router over HTTP and over gRPC: streamed chats, plain, with tools, and with a grammar.

The router is on core 0; a null worker, which makes a step every few milliseconds, and the clients are on core 1. The
answers are canned: words, a repeated tool call, or JSON. The figure is the processor time of all threads of the router
divided by the tokens that clients received; ratios are medians over rounds that alternate between both APIs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import tokenizers

from benchmarks.common.report import Row, publish, show
from benchmarks.common.shapes import BUNDLED
from benchmarks.common.timing import print_duration
from benchmarks.router.observing import started, started_router
from penstock import AsyncClient, Chat
from penstock.config import TracingConfig
from penstock.types import Grammar, GrammarKind

_OTHER_CORE = 1
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_MESSAGES = [{"role": "user", "content": "What is the weather in Rome today? Answer in a few words, please."}]


@dataclass(frozen=True, slots=True)
class ChatKind:
    """A kind of chat, and the text that its answers repeat."""

    name: str
    answer: str
    over_http: Mapping[str, Any] = field(default_factory=dict)  # fields of the body
    over_grpc: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of the client
    tools: tuple[Mapping[str, Any], ...] = ()


KINDS = (
    ChatKind("plain", "the boy went to the river and saw a fish "),
    ChatKind(
        "with tools",
        'I look it up. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome in the rain"}}\n</tool_call>\n',
        over_http={"tools": [_TOOL]},
        tools=(_TOOL,),
    ),
    ChatKind(
        "with a grammar",
        '{"city": "Rome, where it is always warm and dry"} ',
        over_http={"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}},
        over_grpc={"grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))},
    ),
)


async def stream_over_grpc(client: AsyncClient, kind: ChatKind, max_tokens: int) -> None:
    prompt = Chat(_MESSAGES, tools=list(kind.tools)) if kind.tools else _MESSAGES
    num_tokens = 0
    async with client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **kind.over_grpc) as stream:
        async for chunk in stream:
            num_tokens += len(chunk.token_ids)
    assert num_tokens == max_tokens, f"{num_tokens} tokens came"


async def stream_over_http(address: str, body: bytes, num_tokens: int) -> None:
    """Reads the events without parsing them, so that the clients' core keeps up."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = bytearray()
        while b"data: [DONE]" not in received[-64:]:
            part = await reader.read(1 << 16)
            assert part, bytes(received[-300:])
            received += part
    finally:
        writer.close()
    assert f'"completion_tokens":{num_tokens}'.encode() in received, bytes(received[-600:])


async def measure_kind(kind: ChatKind, num_streams: int, num_tokens: int, step_s: float, num_rounds: int) -> Row:
    """Returns the router's microseconds a token over HTTP, with those over gRPC as baseline."""
    body = {
        "model": "null", "messages": _MESSAGES, "max_tokens": num_tokens, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, **kind.over_http,
    }  # fmt: skip
    token_ids = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(kind.answer).ids
    settings = json.dumps({"num_streams": num_streams, "step_s": step_s, "token_ids": token_ids})
    found: dict[str, list[float]] = {"http": [], "grpc": []}
    with contextlib.ExitStack() as stack:
        worker, _ = stack.enter_context(started(_OTHER_CORE, "benchmarks.router.peers", ["worker", settings]))
        target = stack.enter_context(started_router(worker["address"], TracingConfig()))
        encoded = json.dumps(body).encode()
        async with AsyncClient(target.address) as client:
            for number in range(-1, num_rounds):  # the first warms up
                for api in ("http", "grpc") if number % 2 else ("grpc", "http"):
                    before_s = target.cpu_s()
                    streams = [
                        stream_over_http(target.http, encoded, num_tokens)
                        if api == "http"
                        else stream_over_grpc(client, kind, num_tokens)
                        for _ in range(num_streams)
                    ]
                    await asyncio.gather(*streams)
                    if number >= 0:
                        found[api].append((target.cpu_s() - before_s) / (num_streams * num_tokens))
    ratio = median(http / grpc for http, grpc in zip(found["http"], found["grpc"], strict=True))
    print(f"{kind.name}: {ratio:.2f} of gRPC's")
    metric = f"router time of a token over HTTP, {num_streams} streamed chats {kind.name}"
    return Row(metric, median(found["http"]) * 1e6, "us", "gRPC", median(found["grpc"]) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router.http_streams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds, and write no result")
    given = parser.parse_args()
    os.sched_setaffinity(0, {_OTHER_CORE})
    num_rounds = 2 if given.quick else given.rounds
    with print_duration():
        rows = [
            asyncio.run(measure_kind(kind, given.streams, given.tokens, given.step_ms / 1e3, num_rounds))
            for kind in KINDS
        ]
        workload = (
            f"{given.streams} streams of {given.tokens} tokens, a step every {given.step_ms:g} ms, {num_rounds} rounds"
        )
        show("http_streams", workload, rows) if given.quick else publish("http_streams", workload, rows)


if __name__ == "__main__":
    main()
