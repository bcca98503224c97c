"""Requests whose tokens do not pass this router: admitted and placed like any other, then handed out as a ticket.

What the request holds here (its place at the gate, its tenant's budget, what its workers were credited with) is held
until its worker says how it ended, and counted then as for a stream of the router's own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock import wire
from penstock.config import RouterConfig
from penstock.errors import ConfigError, DeadlineExceeded, InternalError, SequenceMoved, Unavailable, from_status
from penstock.secret import ClusterSecret
from penstock.ticket import TicketKey
from penstock.v1 import common_pb2, worker_pb2
from router.decision import Record, leg_record, record
from router.follower import Follower
from router.gate import Gate, Passage
from router.identity import Tenant
from router.membership import Fleet, Group
from router.placement import Placement, Placer, PromptPages
from router.quarantine import Quarantine
from router.request import Request
from router.tally import Tally
from router.verdicts import Used

_WAIT_FOR_WORKER_S = 5.0
_RETRY_AFTER_S = 1.0
_CALL_GENERATE = "call Generate"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a client finds its tokens."""

    request_id: str
    address: str
    ticket: bytes
    lifetime_s: float
    granted_tokens: int | None  # max_tokens, where overload allows fewer than were asked for
    decision: Record | None  # where it was asked for; without what it came to


class Lookaside:
    """Signs tickets, and holds what is held for each until it is over."""

    def __init__(
        self, config: RouterConfig, model: str, fleet: Fleet, placer: Placer, gate: Gate, tally: Tally
    ) -> None:
        secret = ClusterSecret.of(config.security)
        self._key = TicketKey(secret) if secret is not None else None
        self._config = config
        self._model = model
        self._fleet = fleet
        self._placer = placer
        self._gate = gate
        self._tally = tally
        # Prompts that a worker was lost with before a token came. They go through `router.dispatch`, which can tell
        # the one that ends workers from those beside it.
        self._suspects = Quarantine()

    def check(self, request: Request) -> None:
        """Raises ConfigError where its tokens have to come from this router."""
        if self._key is None:
            raise ConfigError(f"lookaside: this router has no cluster secret to sign tickets with; {_CALL_GENERATE}")
        if self._suspects.holds(request.token_ids, time.monotonic()):
            raise ConfigError(f"lookaside: a worker was lost with this prompt; {_CALL_GENERATE}")
        group = self._fleet.group_for(request.model_revision, request.cohort)
        if group is not None:
            _open_to_clients(group)

    async def route(self, request: Request, tenant: Tenant) -> Route:
        """Of one that `check` lets pass; returns once it may go out. Raises as `Generator.outputs` does."""
        assert self._key is not None  # checked
        passage = self._gate.pass_through(request)
        await passage.enter()
        try:
            held = self._place(passage, await self._group(passage.request))
        except BaseException:
            passage.leave()
            raise
        try:
            ticket = self._ticket(held, tenant)
            self._fleet.tickets.add(ticket, held.request.deadline_s, held)
        except BaseException:
            held.let_go()
            raise
        return Route(
            request_id=request.request_id,
            address=held.worker.description.lookaside_address,
            ticket=self._key.sign(ticket),
            lifetime_s=ticket.lifetime_ms / 1e3,
            granted_tokens=passage.granted_tokens,
            decision=held.decision(self._config.policy) if request.explain else None,
        )

    async def _group(self, request: Request) -> Group:
        left_s = request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"request {request.request_id} waited past its deadline")
        group = await self._fleet.wait_for(
            lambda: self._fleet.group_for(request.model_revision, request.cohort), min(left_s, _WAIT_FOR_WORKER_S)
        )
        if group is None:
            raise Unavailable("no decode worker takes requests now; try again", _RETRY_AFTER_S)
        return group

    def _place(self, passage: Passage, group: Group) -> Held:
        """All completions at one decode worker, since one ticket is for one stream."""
        request = passage.request
        pages = PromptPages(request.token_ids, request.salt)
        decode = _open_to_clients(group)
        placements: dict[int, Placement] = {}
        for index in range(request.sampling.n):
            before = request.emitted.get(index)
            if before is not None and before.finished:
                continue
            num_emitted = len(before.token_ids) if before else 0
            placed = placements[index] = self._placer.place(request, pages, num_emitted, group, decode)
            decode = [placed.decode]
        for placed in placements.values():
            self._fleet.ledger.pin(placed.commitment.credits)
        return Held(passage, placements, decode[0], self._fleet, self._placer, self._tally, self._suspect)

    def _suspect(self, request: Request) -> None:
        self._suspects.add(request.token_ids, time.monotonic())

    def _ticket(self, held: Held, tenant: Tenant) -> worker_pb2.Ticket:
        request, now_s = held.request, time.monotonic()
        ticket = worker_pb2.Ticket(
            id=secrets.token_hex(16),
            router=self._fleet.tickets.epoch,
            worker_id=held.worker.worker_id,
            epoch=held.worker.epoch,
            issued_unix_ms=int(time.time() * 1e3),
            lifetime_ms=int(self._config.ticket_lifetime_s * 1e3),
            timeout_ms=max(1, int((request.deadline_s - now_s) * 1e3)),
            request_id=request.request_id,
            model=self._model,
            model_revision=request.model_revision,
            cache_scope=tenant.cache_scope,
            token_ids=request.token_ids,
            sampling=wire.sampling_to_wire(request.sampling),
            lane=wire.lane_to_wire(request.lane),
            waited_ms=(now_s - request.accepted_s) * 1e3,
        )
        for index in range(request.sampling.n):
            before, placed = request.emitted.get(index), held.placements.get(index)
            ticket.completions.add(
                index=index,
                token_ids=before.token_ids if before else (),
                finished=before is not None and before.finished,
                prefill_candidates=placed.candidates if placed else (),
            )
        return ticket


class Held:
    """What the router holds for one ticket: a `tickets.Holder`."""

    def __init__(
        self,
        passage: Passage,
        placements: dict[int, Placement],
        worker: Follower,
        fleet: Fleet,
        placer: Placer,
        tally: Tally,
        suspect: Callable[[Request], None],
    ) -> None:
        self.request = passage.request
        self.placements = placements
        self.worker = worker
        self._passage = passage
        self._epoch = worker.epoch
        self._fleet = fleet
        self._placer = placer
        self._tally = tally
        self._suspect = suspect
        self._used = False
        self._started = False
        self._num_prefill = 0  # outcomes that were told
        self._num_ended = 0  # completions that were counted
        self._cached_tokens = 0

    def decision(self, policy: str) -> Record:
        legs = [leg_record(index, [one.choice], None) for index, one in self.placements.items()]
        return record(self.request.request_id, policy, legs)

    def on_state(self, state: worker_pb2.TicketState) -> None:
        now_s, health = time.monotonic(), self._fleet.health
        if not self._used:
            self._used = True
            for placed in self.placements.values():
                self._fleet.ledger.unpin(placed.commitment.credits, now_s)
        for outcome in state.prefill[self._num_prefill :]:
            health.on_prefill(outcome, self._epoch, now_s)
        self._num_prefill = max(self._num_prefill, len(state.prefill))
        if state.started and not self._started:
            self._started = True
            self._settle_credits()
            health.on_progress(self._epoch, now_s)
            self._passage.start()
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
            decode_ms = state.ended[-1].timing.decode_ms if state.ended else 0.0
            self._leave(self._tally.request(usage, self.request.accepted_s, decode_ms))
            return
        error = from_status(state.error)
        if not isinstance(error, SequenceMoved):
            self._tally.metrics.failed(error.reason)
        if isinstance(error, InternalError):
            self._fleet.health.on_failure(self._epoch, time.monotonic())
        self._leave(Used(state.num_tokens, whole=False))

    def on_silence(self, *, used: bool) -> None:
        self._tally.metrics.failed(Unavailable.reason if used else "UNUSED_TICKET")
        if used:
            self._fleet.health.on_failure(self._epoch, time.monotonic())
            if not self._started:
                self._suspect(self.request)
        self._leave(Used(0, whole=False))

    def let_go(self) -> None:
        """Before anybody has the ticket."""
        self._leave(Used(0, whole=False))

    def _leave(self, used: Used) -> None:
        self._settle_credits()
        self._passage.used = used
        self._passage.leave()

    def _settle_credits(self) -> None:
        for placed in self.placements.values():
            self._fleet.ledger.settle(placed.commitment.credits)

    def _count(self, end: worker_pb2.TicketEnd) -> None:
        timing, metrics = end.timing, self._tally.metrics
        reason = wire.finish_reason_from_wire(end.finish_reason)
        assert reason is not None  # it has ended
        self._tally.completion(reason, timing)
        before = self.request.emitted.get(end.index)
        self._tally.first_token(len(self.request.token_ids), timing.first_token_ms / 1e3)
        num_later = end.num_tokens - (len(before.token_ids) if before else 0) - 1
        if num_later > 0:
            metrics.inter_token_s.observe(timing.decode_ms / 1e3 / num_later, num_later)
        if end.index == 0:
            self._cached_tokens = timing.cached_tokens
        placed = self.placements.get(end.index)
        if placed is not None and timing.prefill_worker and not (timing.num_migrations or self.request.emitted):
            self._placer.on_end(placed, timing, end.num_tokens)


def _open_to_clients(group: Group) -> list[Follower]:
    """Raises ConfigError where nobody is."""
    found = [one for one in group.decode if one.description.lookaside_address]
    if not found:
        raise ConfigError(f"lookaside: no decode worker streams to clients here; {_CALL_GENERATE}")
    return found
