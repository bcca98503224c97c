"""Moves a few pages between two workers through the calls that requests make, to see whether and how fast KV moves.

The probe acts as a router: it submits a prompt that no cache can hold (its salt is random) to a decode worker and names
one prefill worker, or migrates a running sequence to another decode worker. It leaves only a few pages in prefix
caches, which no request will look up.
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

from cluster.diagnose.findings import TransferProbe
from penstock import wire
from penstock.errors import from_rpc_error, from_status
from penstock.rpc.server import Dial
from penstock.types import Member, Role, SamplingParams
from penstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 15.0  # of one pair, connecting included
_MAX_TOKENS = 512  # of the prompt
_MIGRATION_TOKENS = 400  # that a sequence may generate while it migrates


def schedule_pairs(members: Sequence[Member]) -> list[list[tuple[Member, Member]]]:
    """Returns rounds of (source, target): prefill to decode, then decode to decode. A worker occurs once a round, so
    that pairs do not slow each other down."""
    prefill = [member for member in members if member.role is Role.PREFILL]
    decode = [member for member in members if member.role is Role.DECODE]
    size = max(len(prefill), len(decode))
    transfers = [
        [
            (prefill[(index + shift) % size], decode[index])
            for index in range(len(decode))
            if (index + shift) % size < len(prefill)
        ]
        for shift in range(size)
    ]
    migrations = [[(source, target)] for source in decode for target in decode if source != target]
    return [pairs for pairs in (*transfers, *migrations) if pairs]


Descriptions = tuple[worker_pb2.WorkerDescription, worker_pb2.WorkerDescription]  # the source's, the target's


def carries_transfers(source: Member, descriptions: Descriptions) -> bool:
    """Returns whether requests use this pair at all: equal layouts, and a decode worker that lets others prefill."""
    target = descriptions[1]
    if descriptions[0].kv_digest != target.kv_digest:
        return False
    prefills_itself = target.HasField("max_local_tokens") and target.max_local_tokens >= len(_prompt(descriptions))
    return source.role is Role.DECODE or not prefills_itself


async def probe(
    dial: Dial,
    source: Member,
    target: Member,
    descriptions: Descriptions,
) -> TransferProbe:
    """Measures the second of two transfers; the first one connects."""
    tokens = _prompt(descriptions)
    move = partial(_prefill, described=descriptions[0]) if source.role is Role.PREFILL else _migrate
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            transfer = await move(dial, source, target, tokens)
            if not transfer.fault:
                transfer = await move(dial, source, target, tokens)
    except TimeoutError:
        return TransferProbe(source, target, fault=f"did not finish within {_TIMEOUT_S:g} s")
    except grpc.aio.AioRpcError as error:
        return TransferProbe(source, target, fault=from_rpc_error(error).message)
    num_bytes = transfer.num_bytes or _num_pages(len(tokens), descriptions[1]) * descriptions[1].page_bytes
    return TransferProbe(source, target, num_bytes, transfer.transfer_s, transfer.total_s, transfer.fault)


def _prompt(descriptions: Descriptions) -> list[int]:
    """Returns a prompt of one chunk at most, so that its pages move after the computation and not during it."""
    chunk = min(each.chunk_tokens or _MAX_TOKENS for each in descriptions)
    room = min(each.context_length for each in descriptions) // 2
    return [1 + number % 50 for number in range(max(2, min(chunk, room, _MAX_TOKENS)))]


def _num_pages(num_tokens: int, description: worker_pb2.WorkerDescription) -> int:
    return -(-num_tokens // max(1, description.page_size))


async def _prefill(
    dial: Dial, source: Member, target: Member, tokens: Sequence[int], described: worker_pb2.WorkerDescription
) -> TransferProbe:
    candidate = worker_pb2.PrefillCandidate(
        worker_id=source.worker_id, epoch=source.epoch, address=source.address, num_ranks=described.num_ranks
    )
    began_s = time.monotonic()
    fault = ""
    # Two tokens: the second one is sampled from the pages that arrived.
    async with _serve(dial, target, _submit(tokens, max_tokens=2, candidates=[candidate])) as frames:
        async for delta in frames:
            if delta.HasField("prefill") and delta.prefill.fault:
                fault = _FAULTS[delta.prefill.fault]
            if delta.HasField("error"):
                return TransferProbe(source, target, fault=from_status(delta.error).message)
            if delta.finish_reason:
                return _judge(source, target, delta.timing, time.monotonic() - began_s, fault)
    return TransferProbe(source, target, fault="the decode worker ended the call")


_FAULTS = {
    worker_pb2.PREFILL_FAULT_WORKER: "the decode worker could not reach the prefill worker, or was refused there",
    worker_pb2.PREFILL_FAULT_LINK: "the pages did not arrive, or not as announced",
}


def _judge(source: Member, target: Member, timing: common_pb2.Timing, total_s: float, fault: str) -> TransferProbe:
    if not fault and timing.prefill_worker != source.worker_id:
        fault = f"{timing.prefill_worker or target.worker_id} computed the prompt instead"
    return TransferProbe(source, target, 0, timing.transfer_ms / 1e3, total_s, fault)


async def _migrate(dial: Dial, source: Member, target: Member, tokens: Sequence[int]) -> TransferProbe:
    submit = _submit(tokens, max_tokens=min(_MIGRATION_TOKENS, len(tokens)))
    async with _serve(dial, source, submit) as frames, dial(source.address) as channel:
        first = await anext(frames, None)
        if first is None or first.HasField("error"):
            fault = from_status(first.error).message if first is not None else "the decode worker ended the call"
            return TransferProbe(source, target, fault=fault)
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
    if answer.migrated:
        return TransferProbe(source, target, total_s=total_s)
    reasons = [from_status(failure.error).message for failure in answer.failed]
    return TransferProbe(source, target, fault="; ".join(reasons) or "the sequence did not migrate")


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
        remote_prefill=True,
        lane=common_pb2.LANE_INTERACTIVE,
    )


@contextlib.asynccontextmanager
async def _serve(
    dial: Dial, worker: Member, submit: worker_pb2.DecodeSubmit
) -> AsyncIterator[AsyncIterator[worker_pb2.StepDelta]]:
    """Yields the request's deltas; leaving the block releases everything that the request still holds."""
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
