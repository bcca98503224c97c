"""Attacks by clients that request answers and do not read them: all that they hold must be freed at their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import grpc

from benchmarks.attack import http2_frames as h2
from benchmarks.attack.attacks.messages import GENERATE
from benchmarks.attack.sockets import ATTACKER, Http2, connect, post
from benchmarks.attack.target import (
    DEFAULT_TIMEOUT_S,
    MAX_REQUESTS,
    READ_GRACE_S,
    AttackTarget,
    becomes,
    call_code,
    channel,
)
from benchmarks.attack.verdict import Breach
from penstock.v1 import common_pb2, inference_pb2

NUM_READERS = MAX_REQUESTS  # all that their tenant may have
NUM_VICTIMS = 2
_DEADLINE_S = 3
_GRACE_S = READ_GRACE_S + 2.0
_AT_LEAST_S = 10.0  # time for one more answer on a busy machine
_MAX_TOKENS = 900
_PROMPT = "Once upon a time "


def _request() -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=20)
    return inference_pb2.GenerateRequest(text=_PROMPT, sampling=sampling).SerializeToString()


async def _must_release(target: AttackTarget, within_s: float) -> None:
    """Raises Breach if more than the victims' streams is held after `within_s`, or if the tenant's quota is not
    restored.
    """
    began_s = time.monotonic()
    if not await target.wait_until_idle(NUM_VICTIMS, within_s):
        raise Breach(f"{within_s:g} s after {NUM_READERS} unread answers, {await target.describe_held()}")
    request = inference_pb2.GenerateRequest(text=_PROMPT, sampling={"max_tokens": 2}).SerializeToString()
    refusal = ""
    async with channel(target.grpc) as made:

        async def is_served() -> bool:
            nonlocal refusal
            code, refusal = await call_code(made, GENERATE, request, target.key, timeout_s=5.0)
            return code is grpc.StatusCode.OK

        if not await becomes(is_served, max(_AT_LEAST_S, began_s + within_s - time.monotonic())):
            raise Breach(f"their tenant's next request was refused {within_s:g} s later: {refusal}")


async def slow_readers_http(target: AttackTarget) -> None:
    """Streams 24 answers over HTTP into buffers of 2 KiB that nobody empties, with a deadline of 3 s."""
    await _http_readers(target, [("x-request-timeout", str(_DEADLINE_S))], _DEADLINE_S + _GRACE_S)


async def slow_readers_http_without_deadline(target: AttackTarget) -> None:
    """Streams 24 answers over HTTP that nobody reads, and names no deadline."""
    await _http_readers(target, [], DEFAULT_TIMEOUT_S + _GRACE_S)


async def _http_readers(target: AttackTarget, more: list[tuple[str, str]], within_s: float) -> None:
    body = json.dumps(
        {
            "prompt": _PROMPT, "max_tokens": _MAX_TOKENS, "stream": True, "ignore_eos": True, "logprobs": 20,
            "temperature": 0,
        }
    ).encode()  # fmt: skip
    opened = []
    try:
        for _ in range(NUM_READERS):
            _, writer = await connect(target.http, receive_buffer=2048)
            opened.append(writer)
            head = post("/v1/completions", target.key, more)
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        end_s = time.monotonic() + within_s
        await _must_release(target, within_s)

        async def are_closed() -> bool:
            return await target.num_connections(ATTACKER) == 0

        if not await becomes(are_closed, max(_AT_LEAST_S, end_s - time.monotonic())):
            held = await target.num_connections(ATTACKER)
            raise Breach(f"{held} connections whose answers nobody reads were open {within_s:g} s later")
    finally:
        for writer in opened:
            writer.transport.abort()


async def slow_readers_grpc(target: AttackTarget) -> None:
    """Streams 24 answers over gRPC with a window of 0, so that not a byte may be sent, with a deadline of 3 s."""
    await _grpc_readers(target, f"{_DEADLINE_S}S", _DEADLINE_S + _GRACE_S)


async def slow_readers_grpc_without_deadline(target: AttackTarget) -> None:
    """Streams 24 answers over gRPC that nobody reads, and names no deadline."""
    await _grpc_readers(target, "", DEFAULT_TIMEOUT_S + _GRACE_S)


async def _grpc_readers(target: AttackTarget, timeout: str, within_s: float) -> None:
    opened = []
    try:
        for _ in range(NUM_READERS):
            made = await Http2.open(target.grpc, [(h2.INITIAL_WINDOW_SIZE, 0)])
            opened.append(made)
            headers = h2.grpc_headers(GENERATE, target.grpc, target.key, timeout)
            await made.send(h2.open_call(1, headers, _request()))
        await _must_release(target, within_s)
    finally:
        for made in opened:
            await made.close()


async def calls_that_never_ask(target: AttackTarget) -> None:
    """Opens 100 gRPC calls whose message never comes, and HTTP connections that stay open after an answer."""
    opened = []
    try:
        for _ in range(100):
            made = await Http2.open(target.grpc)
            opened.append(made)
            headers = h2.grpc_headers(GENERATE, target.grpc, target.key)
            await made.send(h2.open_call(1, headers, None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(each.closed.wait() for each in opened))
        await _must_release(target, _AT_LEAST_S)
    finally:
        for made in opened:
            await made.close()


async def readers_who_read(target: AttackTarget) -> None:
    """Streams the same 24 answers to clients who read them for 3 s, to show how much their batch alone slows a
    stream.
    """

    async with channel(target.grpc) as made:
        calls = [call_code(made, GENERATE, _request(), target.key, timeout_s=_DEADLINE_S) for _ in range(NUM_READERS)]
        await asyncio.gather(*calls)  # until their deadline
    await _must_release(target, _GRACE_S)


ORDINARY_USE = dict.fromkeys(
    (
        slow_readers_http,
        slow_readers_http_without_deadline,
        slow_readers_grpc,
        slow_readers_grpc_without_deadline,
    ),
    readers_who_read,
)
ATTACKS = (
    slow_readers_http,
    slow_readers_http_without_deadline,
    slow_readers_grpc,
    slow_readers_grpc_without_deadline,
    calls_that_never_ask,
)
