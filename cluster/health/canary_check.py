"""Runs the canary: sends workers the known prompt before they become members, and from time to time afterwards.

The prompt takes the path of real requests: a decode worker, and through it a prefill worker and the transport between
the two. No router is needed, and nothing is cached: each question has its own salt. `CanaryCheck` asks one worker;
`CanaryRunner` decides when, and through which other worker; `cluster.health.canary_policy` judges the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc.aio

from cluster.controller.membership import MembershipPublisher
from cluster.controller.supervised_process import Started
from cluster.health.canary_policy import NUM_ALTERNATIVES, NUM_TOKENS, PROMPT, Answer, CanaryJudge, CanaryToken
from cluster.pools.pool import Incarnation, Pools
from penstock import wire
from penstock.errors import PenstockError, Unavailable, from_status
from penstock.rpc.server import Dial
from penstock.types import Member, Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # of one question
_DESCRIBE_TIMEOUT_S = 2.0
_GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=NUM_ALTERNATIVES)
_MIN_PROMPT_TOKENS = 48  # more than any decode worker prefills locally by default


class WrongAnswer(PenstockError):
    """The worker computes wrongly."""


class ChecksCanary(Protocol):
    """Sends one worker the canary prompt; `CanaryCheck`, or a test double."""

    judge: CanaryJudge

    async def check(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        """Raises WrongAnswer, or Unavailable where there is no answer."""
        ...


class CanaryCheck:
    def __init__(self, judge: CanaryJudge, dial: Dial) -> None:
        self.judge = judge
        self._dial = dial

    async def check(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        """Returns once `member` has answered correctly. Raises WrongAnswer, or Unavailable where there was no answer.

        `decode` and `prefill` have been checked already; a prefill worker is asked through one of `decode`.
        """
        if member.role is Role.DECODE:
            await self._ask_and_judge(member, member, prefill[:1])
            return
        problems: list[PenstockError] = []
        for partner in decode:
            try:
                await self._ask_and_judge(member, partner, [member])
                return
            except PenstockError as error:
                problems.append(error)
                if isinstance(error, WrongAnswer) and await self._answers_alone(partner):
                    raise
        raise Unavailable(f"its first request failed: {problems[-1].message if problems else 'no decode worker'}")

    async def _answers_alone(self, partner: Member) -> bool:
        """Returns whether the decode worker answers correctly without the prefill worker, so that the fault is not its
        own.
        """
        try:
            await self._ask_and_judge(partner, partner, [])
        except PenstockError as error:
            log.warning("%s: %s", partner.worker_id, error.message)
            return False
        return True

    async def _ask_and_judge(self, subject: Member, asked: Member, prefill: Sequence[Member]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._dial(asked.address) as channel:
                described = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
                num_tokens = min(
                    len(PROMPT), max(_MIN_PROMPT_TOKENS, described.max_local_tokens + 1), described.context_length // 2
                )
                candidates = [await self._candidate(member) for member in prefill]
                answer, prefilled_by = await _ask(channel, num_tokens, candidates)
        except TimeoutError:
            raise Unavailable(f"the canary was not answered within {TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the canary failed: {error.code().name}: {error.details()}") from error
        if subject.role is Role.PREFILL and prefilled_by != subject.worker_id:
            raise Unavailable(f"the canary was prefilled by {prefilled_by}: {asked.worker_id} could not reach it")
        question = f"{described.model_revision}/{num_tokens}"  # only answers to the same question are compared
        wrong = self.judge.hear(subject.worker_id, question, answer)
        if wrong:
            raise WrongAnswer(f"it answers wrongly: {wrong}")

    async def _candidate(self, member: Member) -> worker_pb2.PrefillCandidate:
        """Describes a prefill worker; one that does not answer gets 0 ranks, since it cannot prefill either."""
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
    """Returns the answer, and the id of the worker that prefilled."""
    submit = worker_pb2.DecodeSubmit(
        stream_id=1,
        request_id=f"canary-{secrets.token_hex(4)}",
        token_ids=PROMPT[:num_tokens],
        num_prompt_tokens=num_tokens,
        sampling=wire.sampling_to_wire(_GREEDY),
        salt=secrets.token_bytes(16),
        timeout_ms=int(TIMEOUT_S * 1e3),
        prefill_candidates=prefill,
        remote_prefill=True,
    )
    ended = asyncio.Event()

    async def commands() -> AsyncIterator[worker_pb2.DecodeCommand]:
        yield worker_pb2.DecodeCommand(submit=submit)
        await ended.wait()

    answer: list[CanaryToken] = []
    call = worker_pb2_grpc.DecodeWorkerStub(channel).Serve(commands())
    try:
        async for frame in call:
            for delta in frame.deltas:
                if delta.HasField("error"):
                    raise from_status(delta.error)
                for token in delta.logprobs:
                    likeliest = {top.token_id: top.logprob for top in token.top}
                    answer.append(CanaryToken(token.token_id, likeliest | {token.token_id: token.logprob}))
                if delta.finish_reason:
                    return tuple(answer), delta.timing.prefill_worker
        raise Unavailable("the canary's stream ended without an answer")
    finally:
        ended.set()
        call.cancel()


class CanaryRunner:
    def __init__(
        self,
        check: ChecksCanary,
        pools: Pools,
        membership: MembershipPublisher,
        keep_record: Callable[[], None],
        interval_s: float,
    ) -> None:
        """`keep_record` is called after each answer, so that a successor knows it too. With `interval_s` 0 workers are
        asked once, at their start."""
        self.repeats = interval_s > 0.0
        self._check = check
        self._pools = pools
        self._membership = membership
        self._keep_record = keep_record
        self._interval_s = interval_s

    async def check_first(self, incarnation: Incarnation, started: Started) -> None:
        """Asks a worker before it becomes a member. Raises WrongAnswer or Unavailable."""
        self._pools.of(incarnation).on_progress(incarnation, "answers its first request")
        self._membership.publish()
        role = Role(incarnation.pool_name)
        while role is Role.PREFILL and not self._pools.can_decode:
            await self._membership.next_change()  # it can only be asked through a decode worker
        await self._check_member(Member(incarnation.worker_id, started.epoch, role, started.address))

    async def check_repeatedly(self, incarnation: Incarnation) -> str:
        """Asks a member at every interval and never returns; raises WrongAnswer. A question without an answer proves
        nothing: the liveness lease shows whether the worker lives."""
        while True:
            await asyncio.sleep(self._interval_s)
            members = self._membership.members
            member = next((member for member in members if member.worker_id == incarnation.worker_id), None)
            if member is None:
                continue  # it is silent, or drained
            try:
                await self._check_member(member)
            except WrongAnswer:
                raise
            except PenstockError as error:
                log.info("%s: %s", incarnation.worker_id, error.message)

    async def _check_member(self, member: Member) -> None:
        others = [other for other in self._pools.members() if other.epoch != member.epoch]
        decode, prefill = ([other for other in others if other.role is role] for role in (Role.DECODE, Role.PREFILL))
        try:
            await self._check.check(member, decode, prefill)
        finally:
            self._keep_record()
