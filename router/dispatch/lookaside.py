"""Serves requests whose tokens do not pass this router: admits and places them, then signs a ticket for the client.

The router holds the request's admission slot, its tenant's budget and its entries in the in-flight ledger until the
worker reports how the stream ended, and then counts the stream like its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock import wire
from penstock.errors import ConfigError, DeadlineExceeded, InternalError, SequenceMoved, Unavailable, from_status
from penstock.rpc.secret import ClusterSecrets
from penstock.rpc.ticket import TicketKey
from penstock.v1 import common_pb2, worker_pb2
from router.admission.gate import AdmissionSlot
from router.admission.interface import NOTHING_USED, RequestUsage
from router.dispatch.completion_core import WAIT_TO_START_S, no_worker_error
from router.dispatch.context import DispatchContext
from router.dispatch.placement import Placement, PromptPages
from router.fleet.fleet_worker import FleetWorker
from router.fleet.quarantine import Quarantine
from router.fleet.tickets import Silence
from router.fleet.worker_groups import WorkerGroup
from router.prepared_request import PreparedRequest
from router.routing.decision_record import DecisionRecord, completion_record, decision_record
from router.tracing.stages import WorkerLeg

_CALL_GENERATE = "call Generate"
_MIN_UNUSED = 2
_UNUSED_SHARE = 0.25  # of the decode slots, so that one tenant's unused tickets leave most slots to streams
_SILENCES = {
    Silence.UNUSED: "UNUSED_TICKET",
    Silence.LATE: DeadlineExceeded.reason,
    Silence.WORKER_LOST: Unavailable.reason,
}


@dataclass(frozen=True, slots=True)
class Route:
    """The worker that a client streams its tokens from, and the permission to do so."""

    request_id: str
    address: str
    ticket: bytes
    lifetime_s: float
    granted_tokens: int | None  # max_tokens, if overload lowered it
    decision: DecisionRecord | None  # if requested; without actual times


class Lookaside:
    """Issues tickets, whose requests are held until their streams are over."""

    def __init__(self, context: DispatchContext, model: str, secrets: Callable[[], ClusterSecrets | None]) -> None:
        """`secrets` returns the cluster secrets as last read."""
        self._secrets = secrets
        self._context = context
        self._fleet = context.fleet
        self._model = model
        # Prompts whose worker was lost before their first token. Their requests must go through
        # `router.dispatch.token_stream`, which can find out which of a lost worker's prompts killed it.
        self._suspects = Quarantine()

    def check(self, request: PreparedRequest) -> None:
        """Raises ConfigError if the request's tokens have to pass this router."""
        if self._secrets() is None:
            raise ConfigError(f"lookaside: this router has no cluster secret to sign tickets with; {_CALL_GENERATE}")
        if self._suspects.holds(request.token_ids, time.monotonic()):
            raise ConfigError(f"lookaside: a worker died while serving this prompt; {_CALL_GENERATE}")
        limits = self._context.limits_of(request.tenant)
        if request.open_ended and limits.max_inflight_tokens is not None:
            raise ConfigError(f"lookaside: max_tokens is not given, and this tenant's KV is limited; {_CALL_GENERATE}")
        group = self._fleet.group_for(request.model_revision, request.cohort)
        if group is not None:
            _open_to_clients(group)
            self._check_unused(request, group)

    def _check_unused(self, request: PreparedRequest, group: WorkerGroup) -> None:
        """Raises ConfigError if the tenant already has its maximum of unused tickets, each of which holds a slot."""
        limit = self._context.limits_of(request.tenant).max_unused_tickets
        slots = [worker.limits.max_running for worker in group.decode]
        if all(slots):  # 0: unknown
            limit = max(_MIN_UNUSED, min(limit, int(_UNUSED_SHARE * sum(slots))))
        if self._fleet.tickets.num_unused(request.tenant) >= limit:
            raise ConfigError(f"lookaside: {limit} tickets of this tenant are unused; {_CALL_GENERATE}")

    async def route(self, request: PreparedRequest) -> Route:
        """Issues a ticket once the request is admitted; call `check` first. Raises what `Dispatcher.outputs` raises."""
        secrets = self._secrets()
        assert secrets is not None  # `check` has passed
        slot = self._context.gate.pass_through(request)
        await slot.enter()
        try:
            group = await self._wait_for_group(slot.request)
            self._check_unused(slot.request, group)
            held = self._place(slot, group)
        except BaseException:
            slot.leave()
            raise
        try:
            ticket = self._make_ticket(held)
            self._fleet.tickets.add(ticket, held.request.tenant, held.request.deadline_s, held)
        except BaseException:
            held.release()
            raise
        return Route(
            request_id=request.request_id,
            address=held.worker.description.lookaside_address,
            ticket=TicketKey(secrets.current).sign(ticket),
            lifetime_s=ticket.lifetime_ms / 1e3,
            granted_tokens=slot.granted_tokens,
            decision=held.decision(self._context.config.policy) if request.explain else None,
        )

    async def _wait_for_group(self, request: PreparedRequest) -> WorkerGroup:
        left_s = request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"request {request.request_id} waited past its deadline")
        limit_s = min(left_s, self._fleet.patience_s(WAIT_TO_START_S))
        group = await self._fleet.wait_for(
            lambda: self._fleet.group_for(request.model_revision, request.cohort), limit_s
        )
        if group is None:
            raise no_worker_error()
        return group

    def _place(self, slot: AdmissionSlot, group: WorkerGroup) -> HeldRequest:
        """Places all completions at one decode worker, since a ticket is for one stream.

        Raises ConfigError if no decode worker accepts streams from clients.
        """
        request = slot.request
        pages = PromptPages(request.token_ids, request.salt)
        decode = _open_to_clients(group)
        placements: dict[int, Placement] = {}
        for index in range(request.sampling.n):
            earlier = request.emitted.get(index)
            if earlier is not None and earlier.finished:
                continue
            num_emitted = len(earlier.token_ids) if earlier else 0
            placed = placements[index] = self._context.placer.place(request, pages, num_emitted, group, decode)
            decode = [placed.decode]
        for placed in placements.values():
            self._fleet.ledger.pin(placed.commitment.credits)
        return HeldRequest(slot, placements, decode[0], self._context, self._suspect)

    def _suspect(self, request: PreparedRequest) -> None:
        self._suspects.add(request.token_ids, time.monotonic())

    def _make_ticket(self, held: HeldRequest) -> worker_pb2.Ticket:
        request, now_s = held.request, time.monotonic()
        ticket = worker_pb2.Ticket(
            id=secrets.token_hex(16),
            router=self._fleet.tickets.epoch,
            worker_id=held.worker.worker_id,
            epoch=held.worker.epoch,
            issued_unix_ms=int(time.time() * 1e3),
            lifetime_ms=int(self._context.config.ticket_lifetime_s * 1e3),
            timeout_ms=max(1, int((request.deadline_s - now_s) * 1e3)),
            request_id=request.request_id,
            model=request.adapter.name if request.adapter is not None else self._model,
            model_revision=request.model_revision,
            cache_scope=request.cache_scope,
            token_ids=request.token_ids,
            sampling=wire.sampling_to_wire(request.sampling),
            lane=wire.lane_to_wire(request.lane),
            waited_ms=(now_s - request.accepted_s) * 1e3,
            granted_max_tokens=held.granted_tokens,
            adapter=wire.adapter_to_wire(request.adapter),
            tenant=request.tenant,
            kv_hints=wire.kv_hints_to_wire(request.kv_hints),
        )
        for index in range(request.sampling.n):
            earlier, placed = request.emitted.get(index), held.placements.get(index)
            ticket.completions.add(
                index=index,
                token_ids=earlier.token_ids if earlier else (),
                finished=earlier is not None and earlier.finished,
                prefill_candidates=placed.candidates if placed else (),
                prefix_source=placed.prefix_source if placed else None,
            )
        return ticket


class HeldRequest:
    """The resources that the router holds for one ticket. Implements `TicketHolder`."""

    def __init__(
        self,
        slot: AdmissionSlot,
        placements: Mapping[int, Placement],
        worker: FleetWorker,
        context: DispatchContext,
        suspect: Callable[[PreparedRequest], None],
    ) -> None:
        """`suspect` is called if the worker is lost before the first token."""
        self.request = slot.request
        self.placements = placements
        self.worker = worker
        self.granted_tokens = slot.granted_tokens
        self._slot = slot
        self._placed_s = time.monotonic()
        self._epoch = worker.epoch
        self._context = context
        self._ledger, self._health = context.fleet.ledger, context.fleet.health
        self._counts, self._metrics = context.counts, context.metrics
        self._suspect = suspect
        self._used = False
        self._started = False
        self._num_prefill = 0  # prefill outcomes processed so far
        self._num_ended = 0  # completions counted so far
        self._cached_tokens = 0

    def decision(self, policy: str) -> DecisionRecord:
        completions = [
            completion_record(index, [placement.choice], None) for index, placement in self.placements.items()
        ]
        return decision_record(self.request.request_id, policy, completions)

    def on_state(self, state: worker_pb2.TicketState) -> None:
        now_s = time.monotonic()
        if not self._used:
            self._used = True
            for placed in self.placements.values():
                self._ledger.unpin(placed.commitment.credits, now_s)
        for outcome in state.prefill[self._num_prefill :]:
            self._health.on_prefill(outcome, self._epoch, now_s)
        self._num_prefill = max(self._num_prefill, len(state.prefill))
        if state.started and not self._started:
            self._started = True
            self._settle_credits()
            self._health.on_progress(self._epoch, now_s)
            self._slot.start()
        for end in state.ended[self._num_ended :]:
            self._count(end)
        self._num_ended = max(self._num_ended, len(state.ended))

    def on_over(self, state: worker_pb2.TicketState) -> None:
        self.on_state(state)
        if not state.HasField("error"):
            usage = common_pb2.Usage(
                prompt_tokens=len(self.request.token_ids),
                completion_tokens=state.num_tokens,
                cached_tokens=self._cached_tokens,
            )
            last = state.ended[-1].timing if state.ended else None
            self._metrics.requests.generation_tokens.inc(usage.completion_tokens)
            self._leave(self._counts.request(self.request, usage, last))
            return
        error = from_status(state.error)
        if not isinstance(error, SequenceMoved):
            self._metrics.failed(error.reason)
        self._fail_trace(error.reason)
        if isinstance(error, InternalError):
            self._health.on_failure(self._epoch, time.monotonic())
        self._leave(RequestUsage(state.num_tokens, whole=False))

    def on_silence(self, why: Silence) -> None:
        self._metrics.failed(_SILENCES[why])
        self._fail_trace(_SILENCES[why])
        if why is Silence.WORKER_LOST:  # the worker is not to blame for a client that is slow or never connects
            self._health.on_failure(self._epoch, time.monotonic())
            if not self._started:
                self._suspect(self.request)
        self._leave(NOTHING_USED)

    def release(self) -> None:
        """Releases everything held for a ticket that could not be issued."""
        self._leave(NOTHING_USED)

    def _fail_trace(self, reason: str) -> None:
        if self.request.trace is not None:
            self.request.trace.fail(reason)

    def _leave(self, used: RequestUsage) -> None:
        self._settle_credits()
        self._slot.leave(used)

    def _settle_credits(self) -> None:
        for placed in self.placements.values():
            self._ledger.settle(placed.commitment.credits)

    def _count(self, end: worker_pb2.TicketEnd) -> None:
        timing = end.timing
        reason = wire.finish_reason_from_wire(end.finish_reason)
        assert reason is not None  # the completion has ended
        placed = self.placements.get(end.index)
        self._counts.completion(
            self.request,
            reason,
            timing,
            end.num_tokens,
            index=end.index,
            admitted_s=self._slot.admitted_s,
            legs=[WorkerLeg(self.worker.worker_id, self._placed_s)],
            choices=[placed.choice] if placed is not None else [],
        )
        earlier = self.request.emitted.get(end.index)
        self._counts.first_token(self.request, timing.first_token_ms / 1e3)
        num_later = end.num_tokens - (len(earlier.token_ids) if earlier else 0) - 1
        if num_later > 0:
            request, metrics = self.request, self._metrics.requests
            gap_s = metrics.gaps(request.lane, len(request.token_ids), request.tenant)
            gap_s.observe(timing.decode_ms / 1e3 / num_later, num_later)
        if end.index == 0:
            self._cached_tokens = timing.cached_tokens
        if placed is not None and timing.prefill_worker and not (timing.num_migrations or self.request.emitted):
            self._context.placer.on_end(placed, timing, end.num_tokens)


def _open_to_clients(group: WorkerGroup) -> list[FleetWorker]:
    """Returns the decode workers that accept streams from clients. Raises ConfigError if there are none."""
    found = [worker for worker in group.decode if worker.description.lookaside_address]
    if not found:
        raise ConfigError(f"lookaside: no decode worker accepts streams from clients; {_CALL_GENERATE}")
    return found
