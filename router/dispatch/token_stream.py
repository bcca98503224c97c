"""The token stream of one request: places its completions, enforces their deadline, and replaces lost workers.

A completion whose decode worker is lost continues at another, which gets the prompt and the tokens emitted so far.
Sampling depends on (seed, position) alone, so the client's tokens are the same as without the loss. A completion whose
sequence migrates is followed to its new worker. Leaving the stream, for whatever reason, cancels every completion at
its worker.

Tokens are counted when they arrive from workers and read when the client takes them: once generation has ended, a
client that has not read everything holds nothing but its unread tokens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from penstock import wire
from penstock.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    PenstockError,
    Quarantined,
    Unavailable,
    WorkerPaused,
    from_status,
)
from penstock.kv.weights_version import base_revision
from penstock.text.completions import CompletionDelta, num_sent_first
from penstock.types import FinishReason
from penstock.v1 import common_pb2, worker_pb2
from router.admission.interface import RequestUsage
from router.dispatch.completion import DispatchedCompletion
from router.dispatch.completion_core import RETRY_AFTER_S, CompletionCore, no_worker_error
from router.dispatch.context import DispatchContext
from router.dispatch.placement import PromptPages
from router.fleet.fleet_worker import FleetWorker
from router.fleet.quarantine import is_dead
from router.fleet.worker_groups import WorkerGroup
from router.prepared_request import PreparedRequest
from router.routing.decision_record import DecisionRecord, completion_record, decision_record
from router.routing.policy.interface import PairChoice
from router.tracing.stages import EndedCompletion, LegCause, WorkerLeg, stages_ms
from router.tracing.waterfall import RunningCompletion

log = logging.getLogger(__name__)

_RNG = random.Random()


class TokenStream:
    """Use as a context manager: leaving it releases whatever the request holds."""

    def __init__(
        self, request: PreparedRequest, context: DispatchContext, on_over: Callable[[RequestUsage], None]
    ) -> None:
        """`on_over` is called once, when no worker computes for the request any more, even if tokens are unread."""
        self._request = request
        self._on_over = on_over
        self._fleet = context.fleet
        self._placer = context.placer
        self._quarantine = context.quarantine
        self._mailbox: list[tuple[DispatchedCompletion, worker_pb2.StepDelta | PenstockError]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._arrived = asyncio.Event()
        ledger, retries, max_redispatches = context.fleet.ledger, context.gate.retries, context.config.max_redispatches

        def make_core(num_generated: int, over: bool) -> CompletionCore:
            return CompletionCore(ledger, retries, max_redispatches, num_generated=num_generated, over=over)

        self._completions = [DispatchedCompletion(index, request, make_core) for index in range(request.sampling.n)]
        self._waiting = [completion for completion in self._completions if not completion.ended]  # not sent yet
        self._num_own = len(self._waiting)  # completions that an earlier call has not finished
        self._num_running = self._num_own
        self._is_late = False  # the deadline passed before every completion was over
        self._pages = PromptPages(request.token_ids, request.salt)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for completion in self._completions:
            self._release(completion)

    def _release(self, completion: DispatchedCompletion) -> None:
        completion.release()
        self._leave_isolation(completion)
        self._note_over(completion)

    def _note_over(self, completion: DispatchedCompletion) -> None:
        if not completion.is_counted:
            return
        completion.is_counted = False
        self._num_running -= 1
        if not self._num_running:
            self._on_over(self._usage())

    def _usage(self) -> RequestUsage:
        timings = [completion.timing for completion in self._completions if completion.timing is not None]
        return RequestUsage(
            output_tokens=sum(completion.core.num_generated for completion in self._completions),
            cached_tokens=timings[0].cached_tokens if timings else 0,
            decode_s=max(timing.decode_ms for timing in timings) / 1e3 if timings else None,
            whole=len(timings) == self._num_own,
        )

    def end(self, index: int) -> CompletionDelta:
        """Ends a completion at a stop string and cancels it at its worker. Returns its last delta."""
        completion = self._completions[index]
        timing = completion.timing or completion.end_timing(self._request, common_pb2.Timing(), time.monotonic())
        self._release(completion)
        return CompletionDelta(
            index, [], finish_reason=FinishReason.STOP, timing=timing, weight_version=completion.weight_version
        )

    def decision(self, policy: str, ended: Mapping[int, EndedCompletion]) -> DecisionRecord:
        """Returns why each completion ran on its workers. `ended` maps indices to completions whose times are known."""
        completions = [
            completion_record(
                completion.index,
                [placement.choice for placement in completion.placements],
                completion.timing or common_pb2.Timing(),
                stages_ms(ended[completion.index]) if completion.index in ended else {},
                completion.weight_version,
            )
            for completion in self._completions
        ]
        return decision_record(self._request.request_id, policy, completions)

    def legs(self, index: int) -> list[WorkerLeg]:
        """Returns the legs of a completion, in order."""
        return self._completions[index].legs

    def progress(self) -> list[RunningCompletion]:
        """Returns what each completion has done so far."""
        return [
            RunningCompletion(
                completion.index,
                completion.legs,
                self.choices(completion.index),
                len(completion.emitted),
                completion.first_token_s,
                completion.core.num_redispatches,
                completion.timing,
            )
            for completion in self._completions
        ]

    def open_legs(self) -> list[WorkerLeg]:
        """Returns the legs of the completions that have not ended with a finish reason."""
        return [leg for completion in self._completions if completion.timing is None for leg in completion.legs]

    def choices(self, index: int) -> list[PairChoice]:
        """Returns the policy's choices for a completion, in order."""
        return [placement.choice for placement in self._completions[index].placements]

    async def start(self) -> None:
        """Sends the request to its workers. Raises what `next_batch` raises."""
        loop = asyncio.get_running_loop()
        left_s = self._request.deadline_s - time.monotonic()
        self._deadline = loop.call_later(max(0.0, left_s), self._on_deadline)
        await self._send_waiting(num_sent_first(len(self._request.token_ids), len(self._waiting)))

    async def next_batch(self) -> list[CompletionDelta]:
        """Returns what has arrived since the last batch, one delta a completion; empty once all have ended.

        If all completions were over before the deadline, their tokens may be read after it. Raises DeadlineExceeded,
        Unavailable, or the error of a worker that refuses the request.
        """
        while not all(completion.ended for completion in self._completions):
            await self._arrived.wait()
            self._arrived.clear()
            if self._is_late:
                break
            if batch := await self._take():
                return batch
        if self._is_late:
            raise self._too_late()
        return []

    def _on_deadline(self) -> None:
        self._is_late = self._num_running > 0
        for completion in self._completions:
            if not completion.core.over:
                self._release(completion)
        self._arrived.set()

    def _deliver(self, completion: DispatchedCompletion, item: worker_pb2.StepDelta | PenstockError) -> None:
        self._mailbox.append((completion, item))
        self._arrived.set()
        if isinstance(item, PenstockError) or item.HasField("error") or item.HasField("migrated"):
            completion.core.on_left()
        if isinstance(item, worker_pb2.StepDelta):
            self._count(completion, item)

    def _count(self, completion: DispatchedCompletion, item: worker_pb2.StepDelta) -> None:
        num_tokens = len(item.token_ids)
        if num_tokens and not completion.first_token_s:
            completion.first_token_s = time.monotonic()
        if completion.core.on_tokens(num_tokens):
            self._leave_isolation(completion)
            self._fleet.health.on_progress(completion.core.worker_epoch, time.monotonic())
        if item.finish_reason:
            completion.core.on_end()
            completion.end_timing(self._request, item.timing, time.monotonic())
            self._note_over(completion)

    async def _send_waiting(self, count: int) -> None:
        to_send, self._waiting = self._waiting[:count], self._waiting[count:]
        for completion in to_send:
            await self._place(completion)

    async def _take(self) -> list[CompletionDelta]:
        mailbox, self._mailbox = self._mailbox, []
        merged: dict[int, CompletionDelta] = {}
        for completion, item in mailbox:
            if completion.ended:
                continue
            if isinstance(item, PenstockError):
                await self._on_worker_lost(completion)
                await self._redispatch(completion, item)
                continue
            if item.HasField("error"):
                await self._redispatch(completion, from_status(item.error), refused=True)
                continue
            delta = self._read(completion, item)
            if completion.index in merged:
                merged[completion.index].extend(delta)
            elif delta.token_ids or delta.finish_reason:
                merged[completion.index] = delta
            if item.HasField("migrated"):
                await self._follow(completion, item.migrated)
        if merged and self._waiting:
            await self._send_waiting(len(self._waiting))
        return list(merged.values())

    def _read(self, completion: DispatchedCompletion, message: worker_pb2.StepDelta) -> CompletionDelta:
        token_ids = list(message.token_ids)
        if message.HasField("prefill"):
            self._fleet.health.on_prefill(message.prefill, completion.core.worker_epoch, time.monotonic())
        completion.emitted += token_ids
        reason = wire.finish_reason_from_wire(message.finish_reason)
        if reason is None:
            return CompletionDelta(
                completion.index,
                token_ids,
                message.logprobs,
                prompt_logprobs=message.prompt_logprobs,
                weight_version=completion.weight_version,
            )
        completion.ended = True
        timing = completion.timing
        assert timing is not None  # `_count` has set it
        generates = not self._request.kv_hints.only
        if (
            completion.placements
            and generates
            and not (timing.num_migrations or timing.num_redispatches or self._request.emitted)
        ):
            self._placer.on_end(completion.placements[-1], message.timing, len(completion.emitted))
        return CompletionDelta(
            completion.index,
            token_ids,
            message.logprobs,
            reason,
            timing,
            message.prompt_logprobs,
            completion.weight_version,
        )

    async def _follow(self, completion: DispatchedCompletion, migrated: worker_pb2.Migrated) -> None:
        """Continues at the worker that the sequence has migrated to; the ticket claims the sequence there.

        The submission is complete, so that a worker that no longer knows the ticket serves it like a re-dispatch.
        """
        target = self._fleet.find(migrated.worker_id, migrated.epoch)
        if target is None or target.link is None or not target.link.is_open:
            error = Unavailable(f"the sequence is at {migrated.worker_id} now, which this router cannot reach")
            await self._redispatch(completion, error)
            return
        command = completion.submission(self._request, (), self._left_s())
        command.submit.ticket = migrated.ticket
        completion.submit(target, command, time.monotonic(), LegCause.MIGRATED, self._deliver)

    async def _redispatch(
        self, completion: DispatchedCompletion, error: PenstockError, *, refused: bool = False
    ) -> None:
        """Places the completion again after its worker was lost or refused it.

        Raises `error` if it would recur, and Unavailable if no more re-dispatches are allowed.
        """
        now_s = time.monotonic()
        if completion.legs:
            completion.legs[-1].lost_s, completion.legs[-1].error = now_s, error.reason
        if isinstance(error, Unavailable | InternalError) and not isinstance(
            error, Overloaded | AdapterUnavailable | WorkerPaused
        ):
            self._fleet.health.on_failure(completion.core.worker_epoch, now_s)
        completion.core.on_failure(error, now_s, _RNG, refused=refused)
        num_emitted = len(completion.emitted)
        log.info("%s: re-dispatched after %d tokens: %s", self._request.request_id, num_emitted, error.message)
        await self._place(completion, error)

    async def _on_worker_lost(self, completion: DispatchedCompletion) -> None:
        """Isolates a completion that is suspected of killing workers; waits until no other suspect is isolated.

        Raises Quarantined if the worker died while this completion was in isolation.
        """
        was_isolated = completion.in_isolation
        self._leave_isolation(completion)
        if not completion.suspicion.on_worker_lost(len(completion.emitted)):
            return
        if was_isolated and await is_dead(self._fleet.dial, completion.worker_address, completion.core.worker_epoch):
            self._quarantine.add(self._request.token_ids, time.monotonic())
            log.error("%s: its prompt is quarantined, since every worker that served it died", self._request.request_id)
            raise Quarantined(
                f"request {self._request.request_id}: three workers in a row died while serving it; "
                "do not send it again"
            )
        try:
            async with asyncio.timeout(self._request.deadline_s - time.monotonic()):
                await self._quarantine.isolation.acquire()
        except TimeoutError as error:
            raise self._too_late() from error
        completion.in_isolation = True

    def _leave_isolation(self, completion: DispatchedCompletion) -> None:
        if completion.in_isolation:
            completion.in_isolation = False
            self._quarantine.isolation.release()

    async def _place(self, completion: DispatchedCompletion, cause: PenstockError | None = None) -> None:
        """Chooses workers and submits the completion; waits a while if no worker takes requests."""
        group = await self._wait_for_group(completion)
        decode: Sequence[FleetWorker] = [worker for worker in group.decode if completion.core.may_go_to(worker.epoch)]
        if not decode:
            raise cause or Unavailable("every decode worker refused the request", RETRY_AFTER_S)
        placed = self._placer.place(self._request, self._pages, len(completion.emitted), group, decode)
        completion.core.on_placed(placed.commitment.credits)
        completion.placements.append(placed)
        completion.sent_s = time.monotonic()
        timeout_s = self._request.deadline_s - completion.sent_s
        command = completion.submission(self._request, placed.candidates, timeout_s, placed.prefix_source)
        leg = LegCause.REDISPATCHED if completion.legs else LegCause.PLACED
        completion.submit(placed.decode, command, completion.sent_s, leg, self._deliver)

    async def _wait_for_group(self, completion: DispatchedCompletion) -> WorkerGroup:
        """Returns workers of the request's revision, and of its cohort unless the completion was re-dispatched."""
        revision = self._request.model_revision
        cohort = None if completion.core.num_redispatches else self._request.cohort
        patience_s = self._fleet.patience_s(completion.core.patience_s())
        left_s = self._request.deadline_s - time.monotonic()
        group = await self._fleet.wait_for(
            lambda: self._find_group(completion, revision, cohort), min(patience_s, left_s)
        )
        if time.monotonic() >= self._request.deadline_s or (group is None and left_s <= patience_s):
            raise self._too_late()
        if group is None:
            raise no_worker_error()
        if group.model_revision != revision:
            self._restart_with(group.model_revision)
        return group

    def _find_group(self, completion: DispatchedCompletion, revision: str, cohort: str | None) -> WorkerGroup | None:
        """Returns the workers that may serve the completion; None while all of them pause.

        If no worker of the request's revision is left, falls back to another revision: to new weights of the same model
        at any time, to any other revision only before the first token.
        """
        found = self._fleet.group_for(revision, cohort)
        if found is None and self._request.salt_for is not None:
            other = self._fleet.group()
            has_emitted = any(completion.emitted for completion in self._completions)
            if other is not None and (
                not has_emitted or base_revision(other.model_revision) == base_revision(revision)
            ):
                found = other
        if found is not None and completion.core.all_pause([worker.epoch for worker in found.decode]):
            return None
        return found

    def _restart_with(self, revision: str) -> None:
        assert self._request.salt_for is not None
        salt = self._request.salt_for(revision)
        self._request = replace(self._request, model_revision=revision, salt=salt)
        self._pages = PromptPages(self._request.token_ids, salt)

    def _left_s(self) -> float:
        """Returns the time to the deadline. Raises DeadlineExceeded."""
        left_s = self._request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._too_late()
        return left_s

    def _too_late(self) -> DeadlineExceeded:
        waited_s = self._request.deadline_s - self._request.accepted_s
        return DeadlineExceeded(f"request {self._request.request_id} did not end within its {waited_s:.3g} s")
