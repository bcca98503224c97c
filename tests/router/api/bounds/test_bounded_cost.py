"""Sends the costliest messages of the largest permitted size to a router: none may stop its event loop.

Tests assert counted work: errors, fields, the thread. Pauses are the processor time of one event-loop callback, and of
calls that hold the interpreter's lock. Without these bounds the same messages stop the loop for 5 to 60 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading

import grpc.aio
import httpx
import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput, from_rpc_error
from penstock.process.setup import freeze_heap
from penstock.v1 import inference_pb2
from router.api.grpc import request_decoding
from router.api.http import app as http_app
from router.api.openai import requests as openai_requests
from router.api.openai.json_bodies import SMALL_BODY_BYTES, read_json
from tests.router.api.test_grpc_service import failure
from tests.support.router.loop_pauses import MAX_PAUSE_S, bounded_pauses, longest_call_s
from tests.support.router.router_fakes import FakeWorker, running_router

LARGEST = LimitsConfig().request_bytes
MEDIUM = 300_000  # few enough values to be parsed


@pytest.fixture(name="router")
async def _router():
    async with running_router(await FakeWorker().start()) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            for path in ("completions", "chat/completions"):  # the first call imports and compiles
                assert (await http.post(f"/v1/{path}", content=b'{"prompt":[')).status_code == 400
        freeze_heap()  # as a router's process does; the heap of the tests stays frozen
        yield router


@contextlib.contextmanager
def client_of(router):
    """Yields an HTTP client for another thread, so that its computation does not count as the router's."""
    with httpx.Client(base_url=router.http_url, timeout=60.0) as client:
        yield functools.partial(asyncio.to_thread, client.post)


def filled(head: str, value: str, tail: str, size: int) -> bytes:
    """Returns a body of at most `size` bytes that repeats a value."""
    count = (size - len(head) - len(tail)) // (len(value) + 1)
    return (head + ",".join([value] * count) + tail).encode()


def keyed(head: str, value: str, tail: str, size: int) -> bytes:
    """Returns a body of at most `size` bytes that repeats a value under different keys."""
    count = (size - len(head) - len(tail)) // (len(value) + 13)
    return (head + ",".join(f'"{rank:08d}x":{value}' for rank in range(count)) + tail).encode()


CHAT = '{"messages":[{"role":"user","content":"x"}],'
BODIES = {
    "objects as a prompt": ("completions", filled, '{"prompt":[', "{}", "]}"),
    "objects as token ids": ("completions", filled, '{"prompt":[[', "{}", "]]}"),
    "empty prompts": ("completions", filled, '{"prompt":[', "[]", "]}"),
    "empty texts": ("completions", filled, '{"prompt":[', '""', "]}"),
    "fractions as token ids": ("completions", filled, '{"prompt":[', "1.5", "]}"),
    "a text, then numbers": ("completions", filled, '{"prompt":["",', "1", "]}"),
    "numbers as messages": ("chat/completions", filled, '{"messages":[', "0", "]}"),
    "empty messages": ("chat/completions", filled, '{"messages":[', "{}", "]}"),
    "numbers as parts": ("chat/completions", filled, '{"messages":[{"role":"user","content":[', "0", "]}]}"),
    "empty parts": ("chat/completions", filled, '{"messages":[{"role":"user","content":[', "{}", "]}]}"),
    "numbers as stop strings": ("chat/completions", filled, CHAT + '"stop":[', "0", "]}"),
    "texts as stop tokens": ("chat/completions", filled, CHAT + '"stop_token_ids":[', '""', "]}"),
    "texts as biased tokens": ("chat/completions", keyed, CHAT + '"logit_bias":{', "0", "}}"),
    "unsupported values": ("chat/completions", filled, CHAT + '"tools":[', "[]", "]}"),
    "deep lists": ("chat/completions", filled, CHAT + '"tools":', "[" * 1000, ""),
    "escaped quotes": ("completions", filled, '{"prompt":[{},"', '\\\\\\"', '"]}'),
    "many unknown fields": ("completions", keyed, '{"prompt":[{}],', "[]", "}"),
}


@pytest.mark.parametrize("size", [SMALL_BODY_BYTES, MEDIUM, LARGEST])
async def test_no_body_stops_the_event_loop(router, monkeypatch, size):
    num_errors: list[int] = []
    threads: list[threading.Thread] = []
    explain, parse = openai_requests.explain, http_app.parse_body

    def count_errors(error, forms):
        num_errors.append(error.error_count())
        return explain(error, forms)

    def note_thread(*args):
        threads.append(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr(openai_requests, "explain", count_errors)
    monkeypatch.setattr(http_app, "parse_body", note_thread)
    with client_of(router) as post:
        for case, (path, fill, *parts) in BODIES.items():
            body = fill(*parts, size)
            assert size - 2000 < len(body) <= size
            num_errors.clear()
            threads.clear()
            with bounded_pauses(case):
                answer = await post(f"/v1/{path}", content=body)
            assert answer.status_code == 400, (case, answer.text[:300])
            assert len(answer.content) < 1000, case
            assert sum(num_errors) <= 4, case
            assert len(threads) == 1
            assert (threads[0] is threading.main_thread()) == (len(body) <= SMALL_BODY_BYTES)


def test_no_step_of_parsing_a_body_holds_the_lock_for_long():
    limits = LimitsConfig()
    for case, (path, fill, *parts) in BODIES.items():
        kind = openai_requests.ChatBody if "chat" in path else openai_requests.CompletionBody
        parse = functools.partial(openai_requests.parse_body, kind, fill(*parts, LARGEST), limits)
        assert longest_call_s(parse) < MAX_PAUSE_S, case


async def test_token_lists_beyond_the_context_are_refused_unread(router):
    """Reading a million tokens would take tens of milliseconds."""
    message = inference_pb2.GenerateRequest(token_ids=[300] * 100_000)
    error = await failure(router.stub.Generate(message))
    assert error.message == "token_ids: has 100000 tokens; give 2048 or fewer"
    body = '{"prompt":[' + ",".join(["300"] * 500_000) + "]}"
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
        answer = await http.post("/v1/completions", content=body)
    assert answer.json()["error"]["message"] == "body: has 499999 values; send 425984 or fewer"


async def test_a_text_of_special_tokens_does_not_stop_the_event_loop(router):
    """Each special token would become a segment of the prompt cache."""
    text = "<|end|>" * 500_000
    with client_of(router) as post:
        with bounded_pauses("special tokens"):
            answer = await post("/v1/completions", json={"prompt": text})
    assert answer.status_code == 400, answer.text


BROKEN_JSON = (b'[[[{"a":', b'"\\\\\\"",', b'{"messages":[{"role":', b"\\ud800", b'"\xc3\xa9":1,', b"-1e5,")


@pytest.mark.parametrize("seed", range(4))
def test_broken_messages_of_the_largest_size_are_explained_or_decoded(seed):
    """Repeats a piece of a message up to the largest size and breaks it in random places."""
    rng = random.Random(seed)
    limits = LimitsConfig()
    read = request_decoding.tolerant(inference_pb2.GenerateRequest, limits)
    pieces = [data for data, _ in MESSAGES.values()]
    for _ in range(6):
        piece = rng.choice(pieces)[: rng.choice([40, 4000, LARGEST])]
        message = bytearray((piece * (LARGEST // len(piece)))[:LARGEST])
        body = bytearray(rng.choice(BROKEN_JSON) * (LARGEST // 30))
        for broken in (message, body):
            for _ in range(rng.choice([1, 100])):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        assert isinstance(read(bytes(message)), InvalidInput | inference_pb2.GenerateRequest)
        for kind in (openai_requests.ChatBody, openai_requests.CompletionBody):
            with contextlib.suppress(InvalidInput):
                openai_requests.parse_body(kind, bytes(body), limits)


async def test_large_bodies_of_few_values_are_accepted(router):
    limits = LimitsConfig()
    quotes = '\\"[{,\\\\' * 1_000_000
    assert read_json(('{"prompt":"' + quotes + '"}').encode(), limits) == {"prompt": '"[{,\\' * 1_000_000}
    numbers = b'{"prompt":[' + b",".join([b"12345"] * limits.prompt_tokens) + b"]}"
    assert len(read_json(numbers, limits)["prompt"]) == limits.prompt_tokens
    message = '{"role":"user","content":[{"type":"text","text":"What is [this], and {that}?"}]}'
    chat = ('{"messages":[' + ",".join([message] * limits.messages) + "]}").encode()
    assert len(openai_requests.parse_body(openai_requests.ChatBody, chat, limits).messages) == limits.messages


def delimited(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited field of the wire format."""
    length, encoded = len(payload), b""
    while length > 127:
        encoded += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + encoded + bytes([length]) + payload


BROKEN = b"\xff"  # no UTF-8
MANY = "request: has more than 26624 fields; send fewer messages, and pack repeated numbers"
UNREADABLE = "request: is not a penstock.v1.GenerateRequest"
ROOM = LARGEST - 32  # for the bytes around the repeated ones
MESSAGES = {
    "a number without an end": (b"\xff" * LARGEST, UNREADABLE),
    "open groups": (b"\x0b" * LARGEST, MANY),
    "closed groups": ((b"\x0b" * 90 + b"\x0c" * 90) * (ROOM // 180) + delimited(1, BROKEN), MANY),
    "unknown fields": (b"\x78\x00" * (ROOM // 2) + delimited(1, BROKEN), MANY),
    "empty messages": (b"\x22\x00" * (ROOM // 2) + delimited(1, BROKEN), MANY),
    "short messages": (delimited(4, delimited(2, b"x")) * (ROOM // 5) + delimited(1, BROKEN), MANY),
    "empty sampling": (b"\x2a\x00" * (ROOM // 2) + delimited(1, BROKEN), MANY),
    "stop strings": (delimited(5, b"\x6a\x00" * (ROOM // 2) + delimited(13, BROKEN)), MANY),
    "unknown fields of sampling": (delimited(5, b"\xfa\x01\x00" * (ROOM // 3) + delimited(13, BROKEN)), MANY),
    "cut off": (b"\x22\x00" * (ROOM // 2) + b"\x22\x7f", MANY),
    "broken strings": (delimited(1, BROKEN) * (ROOM // 3), MANY),
    "token ids": (delimited(3, b"\x01" * ROOM), f"token_ids: has {ROOM} tokens; give 2098432 or fewer"),
    "emitted tokens": (delimited(8, delimited(2, b"\x01" * ROOM)), f"emitted.token_ids: has {ROOM} tokens; give "),
    "a long text": (delimited(2, b"x" * ROOM + BROKEN), f"text: has {ROOM + 1} bytes; give 524288 or fewer"),
    "many strings in little space": (delimited(5, b"\x6a\x00" * 30_000 + delimited(13, BROKEN)), UNREADABLE),
    "a broken string among few": (
        delimited(4, delimited(1, b"user")) * 1000 + delimited(4, delimited(2, BROKEN)),
        "messages[1000].content: is not valid UTF-8 (invalid start byte at byte 0); send text as UTF-8",
    ),
}


async def test_no_grpc_message_stops_the_event_loop(router, monkeypatch):
    num_numbers = 0
    read_varint = request_decoding._FieldReader._varint

    def counted(reader, at, end):
        nonlocal num_numbers
        num_numbers += 1
        return read_varint(reader, at, end)

    monkeypatch.setattr(request_decoding._FieldReader, "_varint", counted)
    with grpc.insecure_channel(router.grpc_address) as channel:
        call = channel.unary_unary("/penstock.v1.Inference/Route")
        for case, (data, problem) in MESSAGES.items():
            assert len(data) <= LARGEST
            num_numbers = 0
            with bounded_pauses(case):
                with pytest.raises(grpc.RpcError) as caught:
                    await asyncio.to_thread(call, data, timeout=60.0)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidInput), case
            assert error.message.startswith(problem), (case, error.message)
            assert len(error.message) < 200, case
            assert num_numbers <= 2 * (26624 + 4096) + 1, case  # a tag, and a length or value


def tools(count: int, num_properties: int) -> list[dict[str, object]]:
    properties = {f"p{number}": {"type": "string", "description": "x" * 50} for number in range(num_properties)}
    parameters = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"t{number}", "parameters": parameters}} for number in range(count)
    ]


HI = [{"role": "user", "content": "hello"}]
ALLOWED = {
    "messages": ("v1/chat/completions", {"messages": HI * 4096, "max_tokens": 2}),
    "items": ("v1/responses", {"input": HI * 4096, "max_output_tokens": 2}),
    "messages to count": ("tokenize", {"messages": HI * 4096}),
    "tokens to spell": ("tokenize", {"prompt": "hello there " * 9000, "return_token_strs": True}),
    "tokens": ("detokenize", {"tokens": [300] * 200_000}),
    "prompts": ("v1/completions", {"prompt": ["hello there " * 100] * 128, "max_tokens": 2}),
    "answers": (
        "v1/chat/completions",
        {"messages": HI, "max_tokens": 20, "n": 128, "logprobs": True, "top_logprobs": 20},
    ),
    "streamed answers": (
        "v1/chat/completions",
        {"messages": HI, "max_tokens": 20, "n": 128, "logprobs": True, "top_logprobs": 20, "stream": True},
    ),
    "tools": ("v1/chat/completions", {"messages": HI, "max_tokens": 2, "tools": tools(256, 4)}),
    "tools to call": (
        "v1/chat/completions",
        {"messages": HI, "max_tokens": 2, "tools": tools(64, 20), "tool_choice": "required"},
    ),
    "grammar": ("v1/completions", {"prompt": "x", "guided_grammar": "root ::= " + " | ".join(["a"] * 4000)}),
    "schema": ("v1/completions", {"prompt": "x", "guided_json": tools(1, 1000)[0]["function"]}),
}


@pytest.mark.parametrize("case", ALLOWED)
async def test_no_call_within_the_limits_stops_the_event_loop(router, case):
    path, body = ALLOWED[case]
    with client_of(router) as post:
        for warmed_up in (False, True):  # the first call imports, and starts processes
            with bounded_pauses(case) if warmed_up else contextlib.nullcontext():
                answer = await post(f"/{path}", json=body)
    assert answer.status_code in (200, 400), answer.text[:300]


def test_the_largest_messages_within_the_limits_are_decoded():
    limits = LimitsConfig()
    read = request_decoding.tolerant(inference_pb2.GenerateRequest, limits)
    message = inference_pb2.GenerateRequest(token_ids=[12345] * limits.prompt_tokens)
    message.sampling.logit_bias.update(dict.fromkeys(range(limits.logit_bias), 1.0))
    message.emitted.add(token_ids=[12345] * limits.prompt_tokens)
    assert read(message.SerializeToString()) == message
    message = inference_pb2.GenerateRequest()
    for _ in range(limits.messages):
        message.messages.add(role="user", content="x" * 100)
    unknown_group = b"\xfb\x01" + b"\x22\x7f" + bytes(127) + b"\xfc\x01"  # its content is no chat message
    decoded = read(message.SerializeToString() + unknown_group)
    assert len(decoded.messages) == limits.messages
