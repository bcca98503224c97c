"""One request's way to its workers and back: placement, one deadline for all legs, and a new worker for a lost one.

A request is one leg a completion. A leg whose decode worker is lost goes on at another, which gets the prompt and what
was emitted already; draws depend on (seed, position) alone, so the client's stream shows no seam. One whose sequence
was moved goes on where that runs. Leaving a stream, for whatever reason, cancels every leg at its worker.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace
from types import TracebackType

from penstock import legs, wire
from penstock.errors import (
    DeadlineExceeded,
    InternalError,
    Overloaded,
    PenstockError,
    Quarantined,
    Unavailable,
    from_status,
)
from penstock.outputs import TokenDelta
from penstock.retry import RetryBudget
from penstock.types import FinishReason
from penstock.v1 import common_pb2, worker_pb2
from router.autopsy import is_dead
from router.decision import Record, leg_record, record
from router.leg import Leg
from router.membership import Fleet, Group
from router.placement import Placer, PromptPages
from router.quarantine import Quarantine
from router.request import Request

log = logging.getLogger(__name__)

_WAIT_TO_START_S = 5.0  # for a decode worker; a client that is told soon may go elsewhere
_WAIT_TO_RESUME_S = 30.0  # with tokens out already: a dead worker's successor loads its weights first
_RETRY_AFTER_S = 1.0


class TokenStream:
    """One request under way. Use as a context manager: leaving it releases whatever the request holds."""

    def __init__(
        self,
        request: Request,
        fleet: Fleet,
        placer: Placer,
        quarantine: Quarantine,
        max_redispatches: int,
        retries: RetryBudget,
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._placer = placer
        self._quarantine = quarantine
        self._max_redispatches = max_redispatches
        self._retries = retries
        self._mailbox: list[tuple[Leg, object]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._arrived = asyncio.Event()
        self._legs = [Leg(index, request, self._deliver) for index in range(request.sampling.n)]
        self._waiting = [leg for leg in self._legs if not leg.ended]  # not sent yet
        self._pages = PromptPages(request.token_ids, request.salt)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for leg in self._legs:
            self._let_go(leg)

    def _let_go(self, leg: Leg) -> None:
        leg.cancel()
        self._fleet.ledger.settle(leg.credits)
        self._leave_ward(leg)

    def end(self, index: int) -> TokenDelta:
        """The client wants no more of this completion: frees it at its worker. Returns its end."""
        leg = self._legs[index]
        self._let_go(leg)
        return TokenDelta(index, [], finish_reason=FinishReason.STOP, timing=self._timing(leg, common_pb2.Timing()))

    def decision(self, policy: str) -> Record:
        """Why each completion ran where it did; complete once all have ended."""
        legs = [
            leg_record(leg.index, [one.choice for one in leg.placements], leg.timing or common_pb2.Timing())
            for leg in self._legs
        ]
        return record(self._request.request_id, policy, legs)

    async def start(self) -> None:
        """Sends the request. Raises as `next_batch` does."""
        loop = asyncio.get_running_loop()
        left_s = self._request.deadline_s - time.monotonic()
        self._deadline = loop.call_later(max(0.0, left_s), self._arrived.set)
        await self._send_first()

    async def next_batch(self) -> list[TokenDelta]:
        """What has come since the last batch, one delta a completion; empty once every completion has ended.

        Raises DeadlineExceeded, Unavailable, or the error of a worker that refuses the request.
        """
        while not all(leg.ended for leg in self._legs):
            await self._arrived.wait()
            self._arrived.clear()
            if time.monotonic() >= self._request.deadline_s:
                raise self._too_late()
            if batch := await self._take():
                return batch
        return []

    def _deliver(self, leg: Leg, item: object) -> None:
        self._mailbox.append((leg, item))
        self._arrived.set()

    async def _send_first(self) -> None:
        await self._send_waiting(legs.num_ahead(len(self._request.token_ids), len(self._waiting)))

    async def _send_waiting(self, count: int) -> None:
        going, self._waiting = self._waiting[:count], self._waiting[count:]
        for leg in going:
            await self._place(leg)

    async def _take(self) -> list[TokenDelta]:
        mailbox, self._mailbox = self._mailbox, []
        merged: dict[int, TokenDelta] = {}
        for leg, item in mailbox:
            if leg.ended:
                continue
            error = _error_of(item)
            if error is not None:
                lost = isinstance(item, PenstockError)
                if lost:
                    await self._suspect(leg)
                await self._move(leg, error, refused=not lost)
                continue
            assert isinstance(item, worker_pb2.StepDelta)
            delta = self._read(leg, item)
            if leg.index in merged:
                _extend(merged[leg.index], delta)
            elif delta.token_ids or delta.finish_reason:
                merged[leg.index] = delta
            if item.HasField("moved"):
                await self._follow(leg, item.moved)
        if merged and self._waiting:
            await self._send_waiting(len(self._waiting))
        return list(merged.values())

    def _read(self, leg: Leg, message: worker_pb2.StepDelta) -> TokenDelta:
        token_ids = list(message.token_ids)
        if token_ids and not leg.first_token_s:
            leg.first_token_s = time.monotonic()
        if leg.credits and token_ids:
            self._fleet.ledger.settle(leg.credits)
            self._fleet.health.on_progress(leg.decode_epoch, time.monotonic())
            self._leave_ward(leg)
            leg.credits = []
        if message.HasField("prefill"):
            self._fleet.health.on_prefill(message.prefill, leg.decode_epoch, time.monotonic())
        leg.emitted += token_ids
        reason = wire.finish_reason_from_wire(message.finish_reason)
        if reason is None:
            return TokenDelta(leg.index, token_ids, message.logprobs)
        leg.ended = True
        timing = self._timing(leg, message.timing)
        if leg.placements and not (timing.num_migrations or timing.num_redispatches or self._request.emitted):
            self._placer.on_end(leg.placements[-1], message.timing, len(leg.emitted))
        return TokenDelta(leg.index, token_ids, message.logprobs, reason, timing)

    async def _follow(self, leg: Leg, moved: worker_pb2.Moved) -> None:
        """The sequence runs at another worker, which gives it to whoever brings the ticket.

        The submission is whole: a worker that does not know the ticket (any more) serves it as a re-dispatched one.
        """
        target = self._fleet.find(moved.worker_id, moved.epoch)
        if target is None or target.link is None or not target.link.is_open:
            await self._move(
                leg, Unavailable(f"it is at {moved.worker_id} now, out of this router's reach"), refused=False
            )
            return
        timeout_s = self._request.deadline_s - time.monotonic()
        if timeout_s <= 0:
            raise self._too_late()
        leg.runs_at(target)
        command = self._submission(leg, [], timeout_s)
        command.submit.ticket = moved.ticket
        leg.submit(target.link, command)

    async def _move(self, leg: Leg, error: PenstockError, *, refused: bool) -> None:
        """The leg's worker is lost, or refuses: another one goes on. Raises what no other worker can mend."""
        self._fleet.ledger.settle(leg.credits)
        leg.credits = []
        if not isinstance(error, Unavailable):
            if isinstance(error, InternalError):
                self._fleet.health.on_failure(leg.decode_epoch, time.monotonic())
            raise error
        if not isinstance(error, Overloaded):
            self._fleet.health.on_failure(leg.decode_epoch, time.monotonic())
        if leg.num_redispatches >= self._max_redispatches:
            raise Unavailable(
                f"gave up after {leg.num_redispatches} other workers; the last said: {error.message}", _RETRY_AFTER_S
            )
        if not self._retries.take(time.monotonic()):
            raise Unavailable(
                f"too many requests have moved to other workers of late, so this one may not: {error.message}",
                _RETRY_AFTER_S * random.uniform(1.0, 2.0),
            )
        if refused:
            leg.refused_by.add(leg.decode_epoch)
        leg.num_redispatches += 1
        log.info("%s moves on after %d tokens: %s", self._request.request_id, len(leg.emitted), error.message)
        await self._place(leg, error)

    async def _suspect(self, leg: Leg) -> None:
        """Its worker is lost. Raises Quarantined where it is to blame; may wait until other suspects are cleared."""
        alone = leg.in_ward
        self._leave_ward(leg)
        if not leg.suspicion.on_worker_lost(len(leg.emitted)):
            return
        if alone and await is_dead(self._fleet.dial, leg.decode_address, leg.decode_epoch):
            self._quarantine.add(self._request.token_ids, time.monotonic())
            log.error("%s ends every worker that it goes to; it is refused from now on", self._request.request_id)
            raise Quarantined(
                f"request {self._request.request_id}: three workers in a row died of it; do not send it again"
            )
        try:
            async with asyncio.timeout(self._request.deadline_s - time.monotonic()):
                await self._quarantine.ward.acquire()
        except TimeoutError as error:
            raise self._too_late() from error
        leg.in_ward = True

    def _leave_ward(self, leg: Leg) -> None:
        if leg.in_ward:
            leg.in_ward = False
            self._quarantine.ward.release()

    async def _place(self, leg: Leg, cause: PenstockError | None = None) -> None:
        """Chooses workers and submits; waits a while where there is none."""
        group = await self._wait_for_group(leg)
        decode = [one for one in group.decode if one.epoch not in leg.refused_by]
        if not decode:
            raise cause or Unavailable("every decode worker refused the request", _RETRY_AFTER_S)
        placed = self._placer.place(self._request, self._pages, len(leg.emitted), group, decode)
        leg.credits = placed.commitment.credits
        leg.placements.append(placed)
        chosen = placed.decode
        assert chosen.link is not None  # it takes work
        leg.runs_at(chosen)
        leg.sent_s = time.monotonic()
        timeout_s = self._request.deadline_s - leg.sent_s
        leg.submit(chosen.link, self._submission(leg, placed.candidates, timeout_s))

    async def _wait_for_group(self, leg: Leg) -> Group:
        """Workers of the revision that the request began with, and of its cohort until one of them lets it down."""
        revision = self._request.model_revision
        cohort = None if leg.num_redispatches else self._request.cohort
        patience_s = _WAIT_TO_RESUME_S if leg.emitted else _WAIT_TO_START_S
        left_s = self._request.deadline_s - time.monotonic()
        group = await self._fleet.wait_for(lambda: self._find_group(revision, cohort), min(patience_s, left_s))
        if time.monotonic() >= self._request.deadline_s or (group is None and left_s <= patience_s):
            raise self._too_late()
        if group is None:
            raise Unavailable("no decode worker takes requests now; try again", _RETRY_AFTER_S)
        if group.model_revision != revision:
            self._begin_anew(group.model_revision)
        return group

    def _find_group(self, revision: str, cohort: str | None) -> Group | None:
        """Another revision's, where the last worker of this one has gone before anything of the request was told."""
        found = self._fleet.group_for(revision, cohort)
        if found is None and self._request.salt_for is not None and not any(leg.emitted for leg in self._legs):
            return self._fleet.group()
        return found

    def _begin_anew(self, revision: str) -> None:
        assert self._request.salt_for is not None
        salt = self._request.salt_for(revision)
        self._request = replace(self._request, model_revision=revision, salt=salt)
        self._pages = PromptPages(self._request.token_ids, salt)

    def _submission(
        self, leg: Leg, candidates: list[worker_pb2.PrefillCandidate], timeout_s: float
    ) -> worker_pb2.DecodeCommand:
        request, command = self._request, worker_pb2.DecodeCommand()
        submit = command.submit  # filled in place: a message that is put into another one is copied
        submit.request_id = legs.id_of(request.request_id, leg.index, len(self._legs))
        submit.token_ids.extend(request.token_ids)
        submit.token_ids.extend(leg.emitted)
        submit.num_prompt_tokens = len(request.token_ids)
        wire.set_sampling(submit.sampling, leg.sampling)
        submit.salt = request.salt
        submit.timeout_ms = max(1, int(timeout_s * 1e3))
        submit.prefill_candidates.extend(candidates)
        submit.lane = wire.lane_to_wire(request.lane)
        return command

    def _timing(self, leg: Leg, told: common_pb2.Timing) -> common_pb2.Timing:
        """The worker's account, with the times that only the router sees."""
        accepted_s = self._request.accepted_s
        timing = legs.whole_timing(
            told,
            waited_s=0.0 if leg.num_redispatches else leg.sent_s - accepted_s,
            accepted_s=accepted_s,
            first_token_s=leg.first_token_s,
            now_s=time.monotonic(),
            decode_worker=leg.decode_worker,
            num_prompt_tokens=len(self._request.token_ids),
        )
        timing.num_redispatches = leg.num_redispatches
        leg.timing = timing
        return timing

    def _too_late(self) -> DeadlineExceeded:
        waited_s = self._request.deadline_s - self._request.accepted_s
        return DeadlineExceeded(f"request {self._request.request_id} did not end within its {waited_s:.3g} s")


def _error_of(item: object) -> PenstockError | None:
    if isinstance(item, PenstockError):
        return item
    assert isinstance(item, worker_pb2.StepDelta)
    return from_status(item.error) if item.HasField("error") else None


def _extend(delta: TokenDelta, later: TokenDelta) -> None:
    delta.token_ids += later.token_ids
    delta.logprobs = [*delta.logprobs, *later.logprobs]
    delta.finish_reason, delta.timing = later.finish_reason, later.timing
