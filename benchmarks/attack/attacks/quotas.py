"""Attacks on quotas: work that is done before it is charged, and tickets that are forged, repeated or hoarded."""

from __future__ import annotations

import asyncio
import collections
import time

import grpc
import grpc.aio

from benchmarks.attack.attacks.messages import GENERATE, TOKENIZE
from benchmarks.attack.attacks.readers import NUM_VICTIMS
from benchmarks.attack.target import MAX_REQUESTS, AttackTarget, call_code, channel
from benchmarks.attack.verdict import Breach
from penstock.v1 import common_pb2, inference_pb2

ROUTE = "/penstock.v1.Inference/Route"
STREAM = "/penstock.v1.Lookaside/Stream"
_LONGEST = "".join(f"{rank} careful children, named Paul; " for rank in range(120_000))[:3_900_000]
_FLOOD_S = 6.0
_ORDINARY_S = 3.0
_NUM_TICKET_USERS = 12


async def tokenizer_flood(target: AttackTarget) -> None:
    """Keeps eight of the longest texts in the tokenizer; they may only be refused after that work."""
    text = inference_pb2.TokenizeRequest(text=_LONGEST).SerializeToString()
    prompt = inference_pb2.GenerateRequest(text=_LONGEST, sampling={"max_tokens": 1}).SerializeToString()
    async with channel(target.grpc) as made:

        async def keep_sending(rank: int) -> None:
            while True:
                method, message = ((TOKENIZE, text), (GENERATE, prompt))[rank % 2]
                await call_code(made, method, message, target.key, streams=method == GENERATE)

        await _for_a_while(keep_sending, 8)


async def chat_flood(target: AttackTarget) -> None:
    """Keeps eight chats of 4096 messages in the template."""
    messages = [inference_pb2.ChatMessage(role="user", content=f"Number {rank}, please.") for rank in range(4096)]
    message = inference_pb2.TokenizeRequest(messages=messages).SerializeToString()
    async with channel(target.grpc) as made:

        async def keep_sending(rank: int) -> None:
            while True:
                await call_code(made, TOKENIZE, message, target.key, streams=False)

        await _for_a_while(keep_sending, 8)


async def _for_a_while(sender: object, count: int) -> None:
    senders = [asyncio.create_task(sender(rank)) for rank in range(count)]  # type: ignore[operator]
    await asyncio.wait(senders, timeout=_FLOOD_S)
    for each in senders:
        each.cancel()
    ended = await asyncio.gather(*senders, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            raise error


async def many_completions(target: AttackTarget) -> None:
    """Requests 128 completions of long answers at once, again and again, and disconnects."""
    sampling = common_pb2.SamplingParams(max_tokens=1000, n=128, ignore_eos=True)
    message = inference_pb2.GenerateRequest(text="Once", sampling=sampling).SerializeToString()
    async with channel(target.grpc) as made:

        async def keep_sending(rank: int) -> None:
            while True:
                await call_code(made, GENERATE, message, target.key, timeout_s=1.0)
                await asyncio.sleep(0.05)

        await _for_a_while(keep_sending, 4)
    if not await target.wait_until_idle(NUM_VICTIMS):
        raise Breach("completions of clients that left are still held")


async def _route(made: grpc.aio.Channel, key: str) -> inference_pb2.RouteResponse | grpc.aio.AioRpcError:
    request = inference_pb2.GenerateRequest(text="Once upon a time", sampling={"max_tokens": 4})
    call = made.unary_unary(
        ROUTE, request_serializer=bytes, response_deserializer=inference_pb2.RouteResponse.FromString
    )
    try:
        return await call(request.SerializeToString(), timeout=20.0, metadata=(("authorization", f"Bearer {key}"),))
    except grpc.aio.AioRpcError as error:
        return error


async def _ticket(target: AttackTarget) -> inference_pb2.RouteResponse:
    """Returns a ticket of the attacker's tenant."""
    async with channel(target.grpc) as made:
        routed = await _route(made, target.key)
    if isinstance(routed, grpc.aio.AioRpcError):
        raise Breach(f"Route was answered {routed.code().name}: {routed.details()}")
    return routed


async def _stream(made: grpc.aio.Channel, ticket: bytes) -> grpc.StatusCode:
    message = inference_pb2.StreamRequest(ticket=ticket).SerializeToString()
    return (await call_code(made, STREAM, message, timeout_s=20.0))[0]


def _at(address: str) -> str:
    """Returns a ticket's address; without a host it is at the router's host."""
    return address if not address.startswith(":") else f"127.0.0.1{address}"


async def forged_tickets(target: AttackTarget) -> None:
    """Sends altered, invented and very large tickets. The genuine ticket must still work afterwards."""
    routed = await _ticket(target)
    address, ticket = _at(routed.address), routed.ticket
    forged = [bytes([ticket[0] ^ 1]) + ticket[1:], ticket[:-1] + bytes([ticket[-1] ^ 1]), ticket[:-32], b"", b"\0" * 32]
    forged += [ticket + ticket, b"\xff" * (256 << 10), b"\xff" * (7 << 20)]
    for each in forged:
        async with channel(address) as made:
            code = await _stream(made, each)
        if code not in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.INVALID_ARGUMENT,
        ):
            raise Breach(f"a forged ticket of {len(each)} bytes was answered {code.name}")
    for method in ("/penstock.v1.DecodeWorker/Serve", "/penstock.v1.Worker/Describe"):
        async with channel(address) as made:
            code, _ = await call_code(made, method, ticket, timeout_s=5.0)
        if code is not grpc.StatusCode.UNIMPLEMENTED:
            raise Breach(f"the lookaside port answered {method} {code.name}")
    async with channel(address) as made:
        code = await _stream(made, ticket)
    if code is not grpc.StatusCode.OK:
        raise Breach(f"after forged tickets, the genuine one was answered {code.name}")


async def repeated_tickets(target: AttackTarget) -> None:
    """Uses one ticket 50 times, at once and later: one stream may begin."""
    routed = await _ticket(target)
    async with channel(_at(routed.address)) as made:
        codes = collections.Counter(await asyncio.gather(*(_stream(made, routed.ticket) for _ in range(50))))
        codes[await _stream(made, routed.ticket)] += 1
    if codes[grpc.StatusCode.OK] > 1 or set(codes) - {grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED}:
        raise Breach(f"51 uses of a ticket were answered { ({code.name: count for code, count in codes.items()}) }")


async def single_tickets(target: AttackTarget) -> None:
    """Takes and uses one ticket after another from twelve clients for 3 s: no more than 16 may be unused."""
    end_s = time.monotonic() + _ORDINARY_S

    async def one() -> None:
        routed = await _ticket(target)
        async with channel(_at(routed.address)) as made:
            while await _stream(made, routed.ticket) is grpc.StatusCode.OK and time.monotonic() < end_s:
                routed = await _ticket(target)

    await asyncio.gather(*(one() for _ in range(_NUM_TICKET_USERS)))
    if not await target.wait_until_idle(NUM_VICTIMS):
        raise Breach(f"after all tickets were used, {await target.describe_held()}")


async def hoarded_tickets(target: AttackTarget) -> None:
    """Requests 300 tickets and uses none: the tenant gets its share, others get theirs, and the slots are freed."""
    async with channel(target.grpc) as made:
        routed = await asyncio.gather(*(_route(made, target.key) for _ in range(300)))
        granted = sum(not isinstance(each, grpc.aio.AioRpcError) for each in routed)
        if granted > MAX_REQUESTS:
            raise Breach(f"{granted} unused tickets for a tenant of {MAX_REQUESTS} requests at once")
        other = await _route(made, target.credentials.victim_key)
        if isinstance(other, grpc.aio.AioRpcError):
            raise Breach(f"with {granted} unused tickets, another tenant was answered {other.code().name}")
        if not await target.wait_until_idle(NUM_VICTIMS, 25.0):
            raise Breach("unused tickets hold requests 25 s later")


ORDINARY_USE = {repeated_tickets: single_tickets}
ATTACKS = (
    tokenizer_flood,
    chat_flood,
    many_completions,
    forged_tickets,
    repeated_tickets,
    hoarded_tickets,
)
