"""Attacks by many requests at once, and by clients that leave as soon as they have caused work."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import time
from collections.abc import Callable

import grpc
import grpc.aio

from benchmarks.attack.attacks.messages import GENERATE
from benchmarks.attack.attacks.readers import NUM_READERS, NUM_VICTIMS
from benchmarks.attack.sockets import connection, post
from benchmarks.attack.target import AttackTarget, call_code, channel
from benchmarks.attack.verdict import Breach
from penstock.v1 import common_pb2, inference_pb2

_NUM_CLIENTS = 200
_NUM_REQUESTS = 1000
_ORDINARY_S = 3.0  # in which as many clients as may be served at once each wait for their answers
_SERVED_OR_REFUSED = {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}


def _request(max_tokens: int, text: str = "Once upon a time") -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return inference_pb2.GenerateRequest(text=text, sampling=sampling).SerializeToString()


def _long_prompt(rank: int, max_tokens: int) -> bytes:
    return _request(max_tokens, f"{rank} children went to the river. " * 20)


async def _must_be_released(target: AttackTarget) -> None:
    if not await target.wait_until_idle(NUM_VICTIMS):
        raise Breach(f"after all clients have left, {await target.describe_held()}")


async def one_token_and_leave(target: AttackTarget) -> None:
    """Lets 200 clients at once read one token of a long answer and leave, three times over HTTP and gRPC."""
    body = json.dumps({"prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True}).encode()

    async def over_http() -> None:
        async with connection(target.http) as (reader, writer):
            writer.write(post("/v1/completions", target.key) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(10.0):
                    await reader.readuntil(b"data: ")
            writer.transport.abort()

    async def over_grpc(made: grpc.aio.Channel) -> None:
        call = made.unary_stream(GENERATE, request_serializer=bytes, response_deserializer=bytes)(
            _request(1500), timeout=10.0, metadata=(("authorization", f"Bearer {target.key}"),)
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        call.cancel()

    async with channel(target.grpc) as made:
        for _ in range(3):
            clients = [over_http() if each % 2 else over_grpc(made) for each in range(_NUM_CLIENTS)]
            await asyncio.gather(*clients, return_exceptions=True)
    await _must_be_released(target)


async def leave_before_the_first_token(target: AttackTarget) -> None:
    """Cancels 600 calls 0 to 50 ms after they were made."""
    async with channel(target.grpc) as made:

        async def one(rank: int) -> None:
            call = made.unary_stream(GENERATE, request_serializer=bytes, response_deserializer=bytes)(
                _long_prompt(rank, max_tokens=500),
                timeout=10.0,
                metadata=(("authorization", f"Bearer {target.key}"),),
            )
            reading = asyncio.create_task(call.read())
            await asyncio.wait([reading], timeout=rank % 50 / 1000)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        for start in range(0, 600, 100):
            await asyncio.gather(*(one(rank) for rank in range(start, start + 100)))
    await _must_be_released(target)


async def thousand_requests_at_once(target: AttackTarget) -> None:
    """Sends 1000 requests at once: each is served in full or refused with a reason, and none is lost."""
    async with channel(target.grpc) as made:
        codes = await asyncio.gather(
            *(call_code(made, GENERATE, _request(16), target.key) for _ in range(_NUM_REQUESTS))
        )
    found = collections.Counter(code for code, _ in codes)
    if set(found) - _SERVED_OR_REFUSED:
        raise Breach(f"1000 requests were answered { ({code.name: count for code, count in found.items()}) }")
    if not found[grpc.StatusCode.OK]:
        raise Breach("none of 1000 requests was served")
    await _must_be_released(target)


async def _wait_for_answers(target: AttackTarget, request: Callable[[int], bytes]) -> None:
    """Sends one request after another from as many clients as the tenant may have at once, for `_ORDINARY_S`."""
    ranks, end_s = itertools.count(), time.monotonic() + _ORDINARY_S
    async with channel(target.grpc) as made:

        async def one() -> None:
            while time.monotonic() < end_s:
                await call_code(made, GENERATE, request(next(ranks)), target.key)

        await asyncio.gather(*(one() for _ in range(NUM_READERS)))
    await _must_be_released(target)


async def short_answers(target: AttackTarget) -> None:
    """Sends the requests of `thousand_requests_at_once` from 24 clients that each wait for their answers."""
    await _wait_for_answers(target, lambda _: _request(16))


async def first_tokens(target: AttackTarget) -> None:
    """Reads one token of each prompt of `leave_before_the_first_token`."""
    await _wait_for_answers(target, lambda rank: _long_prompt(rank, max_tokens=1))


ORDINARY_USE = {leave_before_the_first_token: first_tokens, thousand_requests_at_once: short_answers}
ATTACKS = (one_token_and_leave, leave_before_the_first_token, thousand_requests_at_once)
