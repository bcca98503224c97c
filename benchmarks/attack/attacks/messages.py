"""Attacks by the content of messages and bodies: bytes that cost more to read, refuse or match than to send."""

from __future__ import annotations

import asyncio
import json
import struct

import grpc

from benchmarks.attack import http2_frames as h2
from benchmarks.attack.sockets import Http2, connection, http_request, post, read_answer
from benchmarks.attack.target import AttackTarget, call_code, channel
from benchmarks.attack.verdict import Breach
from penstock.v1 import common_pb2, inference_pb2

GENERATE = "/penstock.v1.Inference/Generate"
TOKENIZE = "/penstock.v1.Inference/Tokenize"
LARGEST = 8 * 1024 * 1024 - 1024
_REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
_LIE_ENDS_WITHIN_S = 10.0  # including a second for the call's own deadline
CHAT = '{"messages":[{"role":"user","content":"x"}],'
_WORDS = "Once upon a time there was a careful boy named Paul. "


async def _send_grpc(target: AttackTarget, *messages: bytes, method: str = GENERATE) -> None:
    """Sends each message without a key and with one; all must be refused as the caller's error."""
    async with channel(target.grpc) as made:
        for message in messages:
            for key in ("", target.key):
                code, details = await call_code(made, method, message, key, streams=method == GENERATE)
                if code not in _REFUSED:
                    raise Breach(f"{len(message)} bytes were answered {code.name}: {details[:100]}")


async def send_http(target: AttackTarget, path: str, *bodies: bytes) -> None:
    for body in bodies:
        status, answer = await http_request(target.http, post(path, target.key), body)
        if not 400 <= status < 500:
            raise Breach(f"{len(body)} bytes to {path} were answered {status}: {answer[-200:]!r}")


async def ones_256_kib(target: AttackTarget) -> None:
    """Sends 256 KiB of 0xff, a number that never ends, to every call of the gRPC service."""
    for method in (GENERATE, TOKENIZE):
        await _send_grpc(target, *[b"\xff" * (256 << 10)] * 4, method=method)


async def ones_8_mib(target: AttackTarget) -> None:
    """Sends the largest message of 0xff."""
    await _send_grpc(target, *[b"\xff" * LARGEST] * 3)


async def hostile_protobuf(target: AttackTarget) -> None:
    """Sends valid messages of millions of fields: empty chat messages, unpacked numbers, groups, unknown fields."""
    packed = b"\x1a" + _varint(LARGEST - 16) + b"\x01" * (LARGEST - 16)
    nested = b""
    for _ in range(2000):
        nested = b"\x2a" + _varint(len(nested)) + nested
    await _send_grpc(
        target,
        b"\x22\x00" * (LARGEST // 2),  # messages
        b"\x18\x01" * (LARGEST // 2),  # token ids, unpacked
        b"\x0b" * LARGEST,  # groups that begin and never end
        b"\xfb\x7f\xfc\x7f" * (LARGEST // 4),  # unknown groups
        b"\x2a\x04\x52\x02\x08\x01" * (LARGEST // 6),  # sampling with one logit bias each
        packed,
        nested,
    )


def _varint(value: int) -> bytes:
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _repeated(head: str, value: str, tail: str, size: int) -> bytes:
    count = (size - len(head) - len(tail)) // (len(value) + 1)
    return (head + ",".join([value] * count) + tail).encode()


def _biased(value: str, size: int) -> bytes:
    count = size // (len(value) + 13)
    return (CHAT + '"logit_bias":{' + ",".join(f'"{rank:08d}x":{value}' for rank in range(count)) + "}}").encode()


async def _send_lists(target: AttackTarget, size: int) -> None:
    await send_http(
        target,
        "/v1/completions",
        _repeated('{"prompt":[', "{}", "]}", size),
        _repeated('{"prompt":[[', "{}", "]]}", size),
        _repeated('{"prompt":["",', "1", "]}", size),
    )
    await send_http(
        target,
        "/v1/chat/completions",
        _repeated('{"messages":[', "{}", "]}", size),
        _repeated('{"messages":[{"role":"user","content":[', "{}", "]}]}", size),
        _repeated(CHAT + '"stop":[', "{}", "]}", size),
        _biased("{}", size),
    )


async def lists_of_objects_300_kb(target: AttackTarget) -> None:
    """Sends lists of empty objects as prompt, messages, parts, stop strings and logit bias."""
    await _send_lists(target, 300_000)


async def lists_of_objects_8_mb(target: AttackTarget) -> None:
    """Sends the same lists at the largest size of a body."""
    await _send_lists(target, LARGEST)


async def deep_json(target: AttackTarget) -> None:
    """Sends lists and objects inside each other, a million deep, and numbers of a million digits."""
    million = 1_000_000
    await send_http(
        target,
        "/v1/completions",
        b'{"prompt":' + b"[" * million,
        b'{"prompt":' + b'{"a":' * million,
        b'{"prompt":"x","seed":' + b"9" * million + b"}",
        b'{"prompt":"x","temperature":1e' + b"9" * million + b"}",
        b'{"prompt":"' + b"\\u0000" * million + b'"',
    )


async def crafted_stop_strings(target: AttackTarget) -> None:
    """Requests answers of one letter, forced by logit bias, with stop strings that match all but their last letter."""
    async with channel(target.grpc) as made:
        code, details = await call_code(
            made, TOKENIZE, inference_pb2.TokenizeRequest(text="aaaa").SerializeToString(), target.key, streams=False
        )
        if code is not grpc.StatusCode.OK:
            raise Breach(f"Tokenize was answered {code.name}: {details}")
        stop = ["a" * (255 - rank) + "b" for rank in range(16)]
        sampling = common_pb2.SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True, stop=stop)
        for token in range(20, 500):
            sampling.logit_bias[token] = -100.0 if token % 7 else 100.0
        request = inference_pb2.GenerateRequest(text="a" * 200, sampling=sampling)
        for _ in range(3):
            code, details = await call_code(made, GENERATE, request.SerializeToString(), target.key)
            if code not in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise Breach(f"stop strings were answered {code.name}: {details}")


async def template_bombs(target: AttackTarget) -> None:
    """Sends template code as contents and roles, and as many messages as a chat may have."""
    bomb = "{% for a in range(10**9) %}{{ a }}{% endfor %}{{ ''.__class__.__mro__ }}"
    async with channel(target.grpc) as made:
        chats = [
            [inference_pb2.ChatMessage(role="user", content=bomb)] * 64,
            [inference_pb2.ChatMessage(role="user", content="x")] * 4096,
            [inference_pb2.ChatMessage(role="{{ 1 }}", content=bomb)],
            [inference_pb2.ChatMessage(role="system", content=_WORDS * 15_000)] * 9,
        ]
        for messages in chats:
            request = inference_pb2.GenerateRequest(messages=messages, sampling={"max_tokens": 4})
            code, details = await call_code(made, GENERATE, request.SerializeToString(), target.key)
            if code is grpc.StatusCode.INTERNAL or code is grpc.StatusCode.UNKNOWN:
                raise Breach(f"a chat was answered {code.name}: {details}")
        tokenize = inference_pb2.TokenizeRequest(messages=chats[0][:1])
        answer = await made.unary_unary(TOKENIZE, request_serializer=bytes, response_deserializer=bytes)(
            tokenize.SerializeToString(), metadata=(("authorization", f"Bearer {target.key}"),), timeout=60.0
        )
        text = "".join(inference_pb2.TokenizeResponse.FromString(answer).tokens)
        if "__mro__" not in text.replace("\u2581", " "):
            raise Breach(f"template code in a message was executed: {text[:200]}")


async def bad_utf8(target: AttackTarget) -> None:
    """Sends bytes that are not text as prompts, names, bodies and headers."""
    bad = b"\xc3\x28\xed\xa0\x80\xff"
    await _send_grpc(
        target,
        b"\x12" + _varint(len(bad)) + bad,  # text
        b"\x0a" + _varint(len(bad)) + bad,  # model
        b"\x12" + _varint(4_000_000) + b"\xed\xa0\x80\x80" * 1_000_000,
    )
    await send_http(target, "/v1/completions", b'{"prompt":"' + bad + b'"}', b"\xff" * 1_000_000, bad)
    head = post("/v1/completions", target.key) + b"X-Penstock-Session: " + bad + b"\r\n"
    status, answer = await http_request(target.http, head, b'{"prompt":"x","max_tokens":2}')
    if status not in (200, 400, 429):
        raise Breach(f"a header that is not text was answered {status}: {answer[-200:]!r}")


async def oversized_headers(target: AttackTarget) -> None:
    """Sends headers and metadata of a megabyte, thousands of headers, and a request line without end."""
    heads = [
        post("/v1/completions", target.key) + b"X-A: " + b"a" * 1_000_000 + b"\r\n",
        post("/v1/completions", target.key) + b"".join(b"X-%d: a\r\n" % rank for rank in range(50_000)),
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n",
    ]
    for head in heads:
        status, answer = await http_request(target.http, head, b"{}")
        if status == 200 or status >= 500:
            raise Breach(f"a head of {len(head)} bytes was answered {status}: {answer[-200:]!r}")
    async with channel(target.grpc) as made:
        call = made.unary_unary(TOKENIZE, request_serializer=bytes, response_deserializer=bytes)
        try:
            await call(b"", metadata=(("x-a", "a" * 1_000_000),), timeout=20.0)
            raise Breach("metadata of a megabyte was accepted")
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                raise Breach(f"metadata of a megabyte was answered {error.code().name}") from error


_PATHS = (
    "/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//metrics", "/v1/../metrics", "/metrics/", "/metrics%00",
    "/metrics;a=b", "/%6detrics", "/v1/models/../../metrics", "/v1/models/%2e%2e%2f%2e%2e%2fmetrics", "/METRICS",
    "/v1/models/" + "a" * 10_000, "/docs", "/openapi.json", "/redoc", "http://127.0.0.1/metrics", "*", "/\\..\\metrics",
)  # fmt: skip


async def path_tricks(target: AttackTarget) -> None:
    """Requests files and the metrics by malformed paths, and smuggles a request behind another one."""
    for path in _PATHS:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n".encode()
        status, answer = await http_request(target.http, head, timeout_s=20.0)
        if b"root:" in answer or b"penstock:saturation" in answer or status >= 500:
            raise Breach(f"{path} was answered {status}: {answer[-200:]!r}")
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"
    async with connection(target.http) as (reader, writer):
        writer.write(head + b"0\r\n\r\n" + smuggled)
        _, answer = await read_answer(reader, 2.0)
        if b"penstock:saturation" in answer:
            raise Breach("a request behind another one reached the metrics")


async def framing_lies(target: AttackTarget) -> None:
    """Sends gRPC messages that announce 4 GiB, announce more bytes than follow, or are not compressed as claimed."""
    lies = [
        b"\0" + struct.pack(">I", 0xFFFFFFFF) + b"x" * 100,
        b"\0" + struct.pack(">I", 1000) + b"x",
        b"\1" + struct.pack(">I", 1000) + b"\xff" * 1000,
        b"\7" * 1000,
    ]
    headers = h2.grpc_headers(GENERATE, target.grpc, target.key, "1S")

    async def is_ended(lie: bytes) -> bool:
        """Returns whether the call has ended within its deadline and a few seconds more."""
        made = await Http2.open(target.grpc)
        await made.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.header_block(headers)))
        await made.send(b"".join(h2.data_frames(1, lie)))
        try:
            return await made.has_ended(_LIE_ENDS_WITHIN_S)
        finally:
            await made.close()

    ended = await asyncio.gather(*(is_ended(lie) for lie in lies * 100))
    if not all(ended):
        raise Breach(f"{ended.count(False)} of {len(ended)} calls with false framing outlived their deadline")


async def stored_responses(target: AttackTarget) -> None:
    """Makes the router store 300 large responses of one token each."""
    body = json.dumps({"input": "x", "instructions": "y " * 300, "max_output_tokens": 1, "metadata": {"a": "b" * 500}})
    for _ in range(300):
        status, answer = await http_request(target.http, post("/v1/responses", target.key), body.encode())
        if status not in (200, 429):
            raise Breach(f"a response to be stored was answered {status}: {answer[-200:]!r}")


ATTACKS = (
    ones_256_kib,
    ones_8_mib,
    hostile_protobuf,
    framing_lies,
    lists_of_objects_300_kb,
    lists_of_objects_8_mb,
    deep_json,
    crafted_stop_strings,
    template_bombs,
    bad_utf8,
    oversized_headers,
    path_tricks,
    stored_responses,
)
