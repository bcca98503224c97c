"""The controller's part of `penstock doctor`: workers accept calls only from processes of their own deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio

from cluster.diagnose.findings import Finding, Severity, TransferProbe, WorkerCheckup, judge_transfers, judge_workers
from cluster.diagnose.pair_probe import carries_transfers, probe, schedule_pairs
from penstock.errors import from_rpc_error
from penstock.rpc.server import Dial
from penstock.types import Member
from penstock.v1 import worker_pb2, worker_pb2_grpc

_CALL_TIMEOUT_S = 10.0
_MAX_ROUNDS = 64  # of pairs: minutes at most, in the largest deployments


@dataclass(frozen=True, slots=True)
class _Unanswered:
    member: Member
    reason: str


async def examine(members: Sequence[Member], dial: Dial, *, transfers: bool) -> AsyncIterator[Finding]:
    """Checks all workers at once, then, with `transfers`, moves pages between every two that serve each other."""
    answers = await asyncio.gather(*(_check_up(member, dial) for member in members))
    for answer in answers:
        if isinstance(answer, _Unanswered):
            advice = "it is a member and does not answer: see its log; the controller replaces it soon"
            yield Finding("answers", answer.member.worker_id, Severity.PROBLEM, answer.reason, advice)
    checkups = [answer for answer in answers if isinstance(answer, WorkerCheckup)]
    for finding in judge_workers(checkups):
        yield finding
    if not transfers:
        yield Finding("transfer", "all pairs", Severity.SKIPPED, "switched off")
        return
    for finding in judge_transfers(await _probe_pairs(checkups, dial)):
        yield finding


async def _check_up(member: Member, dial: Dial) -> WorkerCheckup | _Unanswered:
    try:
        async with dial(member.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_CALL_TIMEOUT_S)
            sent_s = time.time()
            report = await stub.Checkup(worker_pb2.CheckupRequest(), timeout=_CALL_TIMEOUT_S)
            return WorkerCheckup(member, description, report, sent_s, time.time())
    except grpc.aio.AioRpcError as error:
        return _Unanswered(member, from_rpc_error(error).message)


async def _probe_pairs(checkups: Sequence[WorkerCheckup], dial: Dial) -> list[TransferProbe]:
    descriptions = {checkup.member.epoch: checkup.description for checkup in checkups}
    probes: list[TransferProbe] = []
    for pairs in schedule_pairs([checkup.member for checkup in checkups])[:_MAX_ROUNDS]:
        described = [(pair, (descriptions[pair[0].epoch], descriptions[pair[1].epoch])) for pair in pairs]
        probes += await asyncio.gather(
            *(probe(dial, *pair, both) for pair, both in described if carries_transfers(pair[0], both))
        )
    return probes
