"""A few pages from one worker to another, through the very calls that requests make: whether and how fast KV moves.

The probe stands in a router's place: it submits a prompt that no cache can hold (its salt is fresh) to a decode worker
and names one prefill worker, or lets a running sequence move to another decode worker. Nothing of it stays but a few
pages in prefix caches, which nobody will look up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc
import grpc.aio

from cluster.findings import HandOff
from penstock import wire
from penstock.errors import from_rpc_error, from_status
from penstock.grpc_server import Dial
from penstock.types import Member, Role, SamplingParams
from penstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 15.0  # of one pair, connecting included
_MAX_TOKENS = 512  # of the prompt
_MOVED_TOKENS = 400  # that a sequence may draw while it is moved


def rounds(members: Sequence[Member]) -> list[list[tuple[Member, Member]]]:
    """Every (source, target) that KV takes: prefill to decode, then decode to decode. Within a round nobody is twice,
    so that no pair slows another down."""
    prefill = [one for one in members if one.role is Role.PREFILL]
    decode = [one for one in members if one.role is Role.DECODE]
    size = max(len(prefill), len(decode))
    both = [
        [
            (prefill[(index + shift) % size], decode[index])
            for index in range(len(decode))
            if (index + shift) % size < len(prefill)
        ]
        for shift in range(size)
    ]
    moves = [[(source, target)] for source in decode for target in decode if source != target]
    return [pairs for pairs in (*both, *moves) if pairs]


Descriptions = tuple[worker_pb2.WorkerDescription, worker_pb2.WorkerDescription]  # the source's, the target's


def is_used(source: Member, descriptions: Descriptions) -> bool:
    """Whether requests take this way at all: one layout, and a decode worker that lets others prefill."""
    target = descriptions[1]
    if descriptions[0].kv_digest != target.kv_digest:
        return False
    keeps = target.HasField("max_local_tokens") and target.max_local_tokens >= len(_prompt(descriptions))
    return source.role is Role.DECODE or not keeps


async def probe(
    dial: Dial,
    source: Member,
    target: Member,
    descriptions: Descriptions,
) -> HandOff:
    """Of the second of two transfers: the first one connects."""
    tokens = _prompt(descriptions)
    move = partial(_prefill, described=descriptions[0]) if source.role is Role.PREFILL else _migrate
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            hand_off = await move(dial, source, target, tokens)
            if not hand_off.fault:
                hand_off = await move(dial, source, target, tokens)
    except TimeoutError:
        return HandOff(source, target, fault=f"not over within {_TIMEOUT_S:g} s")
    except grpc.aio.AioRpcError as error:
        return HandOff(source, target, fault=from_rpc_error(error).message)
    num_bytes = hand_off.num_bytes or _num_pages(len(tokens), descriptions[1]) * descriptions[1].page_bytes
    return HandOff(source, target, num_bytes, hand_off.transfer_s, hand_off.total_s, hand_off.fault)


def _prompt(descriptions: Descriptions) -> list[int]:
    """One chunk of prompt at most, so that its pages move after it was computed and not meanwhile."""
    chunk = min(one.chunk_tokens or _MAX_TOKENS for one in descriptions)
    room = min(one.context_length for one in descriptions) // 2
    return [1 + number % 50 for number in range(max(2, min(chunk, room, _MAX_TOKENS)))]


def _num_pages(num_tokens: int, description: worker_pb2.WorkerDescription) -> int:
    return -(-num_tokens // max(1, description.page_size))


async def _prefill(
    dial: Dial, source: Member, target: Member, tokens: Sequence[int], described: worker_pb2.WorkerDescription
) -> HandOff:
    candidate = worker_pb2.PrefillCandidate(
        worker_id=source.worker_id, epoch=source.epoch, address=source.address, num_ranks=described.num_ranks
    )
    began_s = time.monotonic()
    fault = ""
    # Two tokens: the second one is drawn from the pages that came.
    async with _serve(dial, target, _submit(tokens, max_tokens=2, candidates=[candidate])) as frames:
        async for delta in frames:
            if delta.HasField("prefill") and delta.prefill.fault:
                fault = _FAULTS[delta.prefill.fault]
            if delta.HasField("error"):
                return HandOff(source, target, fault=from_status(delta.error).message)
            if delta.finish_reason:
                return _judge(source, target, delta.timing, time.monotonic() - began_s, fault)
    return HandOff(source, target, fault="the decode worker ended the call")


_FAULTS = {
    worker_pb2.PREFILL_FAULT_WORKER: "the decode worker could not reach the prefill worker, or was refused there",
    worker_pb2.PREFILL_FAULT_LINK: "the pages did not come, or not as they were announced",
}


def _judge(source: Member, target: Member, timing: common_pb2.Timing, total_s: float, fault: str) -> HandOff:
    if not fault and timing.prefill_worker != source.worker_id:
        fault = f"{timing.prefill_worker or target.worker_id} computed the prompt in its place"
    return HandOff(source, target, 0, timing.transfer_ms / 1e3, total_s, fault)


async def _migrate(dial: Dial, source: Member, target: Member, tokens: Sequence[int]) -> HandOff:
    submit = _submit(tokens, max_tokens=min(_MOVED_TOKENS, len(tokens)))
    async with _serve(dial, source, submit) as frames, dial(source.address) as channel:
        first = await anext(frames, None)
        if first is None or first.HasField("error"):
            fault = from_status(first.error).message if first is not None else "the decode worker ended the call"
            return HandOff(source, target, fault=fault)
        began_s = time.monotonic()
        answer = await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(
            worker_pb2.MigrateRequest(
                worker_id=target.worker_id,
                epoch=target.epoch,
                address=target.address,
                request_ids=[submit.request_id],
                source_address=source.address,
            ),
            timeout=_TIMEOUT_S,
        )
        total_s = time.monotonic() - began_s
    if answer.moved:
        return HandOff(source, target, total_s=total_s)
    reasons = [from_status(one.error).message for one in answer.failed]
    return HandOff(source, target, fault="; ".join(reasons) or "the sequence did not move")


def _submit(
    tokens: Sequence[int], max_tokens: int, candidates: Sequence[worker_pb2.PrefillCandidate] = ()
) -> worker_pb2.DecodeSubmit:
    return worker_pb2.DecodeSubmit(
        stream_id=1,
        request_id=f"doctor-{os.urandom(8).hex()}",
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=wire.sampling_to_wire(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)),
        salt=os.urandom(16),
        timeout_ms=int(_TIMEOUT_S * 1e3),
        prefill_candidates=candidates,
        lane=common_pb2.LANE_INTERACTIVE,
    )


@contextlib.asynccontextmanager
async def _serve(
    dial: Dial, worker: Member, submit: worker_pb2.DecodeSubmit
) -> AsyncIterator[AsyncIterator[worker_pb2.StepDelta]]:
    """The request's deltas; leaving the block releases all that it still has."""
    async with dial(worker.address) as channel:
        call = worker_pb2_grpc.DecodeWorkerStub(channel).Serve()
        try:
            await call.write(worker_pb2.DecodeCommand(submit=submit))
            yield _deltas(call)
        finally:
            call.cancel()


async def _deltas(call: grpc.aio.StreamStreamCall) -> AsyncIterator[worker_pb2.StepDelta]:
    async for frame in call:
        for delta in frame.deltas:
            yield delta
