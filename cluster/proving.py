"""Puts the canary's question to workers, over the way that real requests take: a decode worker, and through it a
prefill worker and the wire between the two. No router is needed, and nothing is cached: each question has its own salt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from cluster.canary import NUM_ALTERNATIVES, NUM_TOKENS, PROMPT, Answer, Judge, Said
from penstock import wire
from penstock.errors import PenstockError, Unavailable, from_status
from penstock.grpc_server import Dial
from penstock.types import Member, Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # of one question
_DESCRIBE_TIMEOUT_S = 2.0
_GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=NUM_ALTERNATIVES)
_LEAST_TOKENS = 48  # more than any decode worker computes itself by default


class Poisoned(PenstockError):
    """The worker answers wrongly."""


class Proving:
    def __init__(self, judge: Judge, dial: Dial) -> None:
        self.judge = judge
        self._dial = dial

    async def prove(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        """Returns when it answered rightly. Raises Poisoned, or Unavailable where there was no answer.

        `decode` and `prefill` are proven already; a prefill worker needs one of `decode` to be asked through.
        """
        if member.role is Role.DECODE:
            await self._judge(member, member, prefill[:1])
            return
        problems: list[PenstockError] = []
        for partner in decode:
            try:
                await self._judge(member, partner, [member])
                return
            except PenstockError as error:
                problems.append(error)
                if isinstance(error, Poisoned) and await self._answers_alone(partner):
                    raise
        raise Unavailable(f"its first request failed: {problems[-1].message if problems else 'no decode worker'}")

    async def _answers_alone(self, partner: Member) -> bool:
        """Whether the fault is not the partner's."""
        try:
            await self._judge(partner, partner, [])
        except PenstockError as error:
            log.warning("%s: %s", partner.worker_id, error.message)
            return False
        return True

    async def _judge(self, subject: Member, asked: Member, prefill: Sequence[Member]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._dial(asked.address) as channel:
                described = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
                num_tokens = min(
                    len(PROMPT), max(_LEAST_TOKENS, described.max_local_tokens + 1), described.context_length // 2
                )
                candidates = [await self._candidate(one) for one in prefill]
                answer, prefilled_by = await _ask(channel, num_tokens, candidates)
        except TimeoutError:
            raise Unavailable(f"the canary was not answered within {TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the canary failed: {error.code().name}: {error.details()}") from error
        if subject.role is Role.PREFILL and prefilled_by != subject.worker_id:
            raise Unavailable(f"the canary was prefilled by {prefilled_by}: {asked.worker_id} could not reach it")
        question = f"{described.model_revision}/{num_tokens}"  # what two workers must agree in to be compared
        wrong = self.judge.hear(subject.worker_id, question, answer)
        if wrong:
            raise Poisoned(f"it answers wrongly: {wrong}")

    async def _candidate(self, member: Member) -> worker_pb2.PrefillCandidate:
        """One that does not say how many ranks it has cannot prefill either."""
        num_ranks = 0
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(_DESCRIBE_TIMEOUT_S), self._dial(member.address) as channel:
                described = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
                num_ranks = described.num_ranks
        return worker_pb2.PrefillCandidate(
            worker_id=member.worker_id, epoch=member.epoch, address=member.address, num_ranks=num_ranks
        )


async def _ask(
    channel: grpc.aio.Channel, num_tokens: int, prefill: Sequence[worker_pb2.PrefillCandidate]
) -> tuple[Answer, str]:
    """The answer, and who prefilled."""
    submit = worker_pb2.DecodeSubmit(
        stream_id=1,
        request_id=f"canary-{secrets.token_hex(4)}",
        token_ids=PROMPT[:num_tokens],
        num_prompt_tokens=num_tokens,
        sampling=wire.sampling_to_wire(_GREEDY),
        salt=secrets.token_bytes(16),
        timeout_ms=int(TIMEOUT_S * 1e3),
        prefill_candidates=prefill,
    )
    ended = asyncio.Event()

    async def commands() -> AsyncIterator[worker_pb2.DecodeCommand]:
        yield worker_pb2.DecodeCommand(submit=submit)
        await ended.wait()

    said: list[Said] = []
    call = worker_pb2_grpc.DecodeWorkerStub(channel).Serve(commands())
    try:
        async for frame in call:
            for delta in frame.deltas:
                if delta.HasField("error"):
                    raise from_status(delta.error)
                for one in delta.logprobs:
                    likeliest = {top.token_id: top.logprob for top in one.top}
                    said.append(Said(one.token_id, likeliest | {one.token_id: one.logprob}))
                if delta.finish_reason:
                    return tuple(said), delta.timing.prefill_worker
        raise Unavailable("the canary's stream ended without an answer")
    finally:
        ended.set()
        call.cancel()
