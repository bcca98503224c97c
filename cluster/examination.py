"""The controller's part of `penstock doctor`: workers take calls of their own deployment's processes alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio

from cluster.findings import Checkup, Finding, HandOff, Verdict, examine_hand_offs, examine_workers
from cluster.pair_probe import is_used, probe, rounds
from penstock.errors import from_rpc_error
from penstock.grpc_server import Dial
from penstock.types import Member
from penstock.v1 import worker_pb2, worker_pb2_grpc

_ASK_TIMEOUT_S = 10.0
_MAX_ROUNDS = 64  # of pairs: minutes at most, in the largest deployments


@dataclass(frozen=True, slots=True)
class _Silent:
    member: Member
    reason: str


async def examine(members: Sequence[Member], dial: Dial, *, transfers: bool) -> AsyncIterator[Finding]:
    """Asks every worker at once, then lets pages move between every two of them, if `transfers`."""
    answers = await asyncio.gather(*(_check_up(member, dial) for member in members))
    for one in answers:
        if isinstance(one, _Silent):
            advice = "it is in the membership and does not answer: see its log; the controller replaces it soon"
            yield Finding("answers", one.member.worker_id, Verdict.PROBLEM, one.reason, advice)
    checkups = [one for one in answers if isinstance(one, Checkup)]
    for finding in examine_workers(checkups):
        yield finding
    if not transfers:
        yield Finding("transfer", "all pairs", Verdict.SKIPPED, "not asked for")
        return
    for finding in examine_hand_offs(await _probe_pairs(checkups, dial)):
        yield finding


async def _check_up(member: Member, dial: Dial) -> Checkup | _Silent:
    try:
        async with dial(member.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_ASK_TIMEOUT_S)
            asked_s = time.time()
            report = await stub.Checkup(worker_pb2.CheckupRequest(), timeout=_ASK_TIMEOUT_S)
            return Checkup(member, description, report, asked_s, time.time())
    except grpc.aio.AioRpcError as error:
        return _Silent(member, from_rpc_error(error).message)


async def _probe_pairs(checkups: Sequence[Checkup], dial: Dial) -> list[HandOff]:
    descriptions = {one.member.epoch: one.description for one in checkups}
    hand_offs: list[HandOff] = []
    for pairs in rounds([one.member for one in checkups])[:_MAX_ROUNDS]:
        ways = [(source, target, (descriptions[source.epoch], descriptions[target.epoch])) for source, target in pairs]
        hand_offs += await asyncio.gather(*(probe(dial, *way) for way in ways if is_used(way[0], way[2])))
    return hand_offs
