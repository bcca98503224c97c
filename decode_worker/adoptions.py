"""Sequences on their way here from other decode workers, and those that wait here for their router. On the step loop.

A sequence gets pages reserved, arrives page by page like a prompt's KV (`Transfers`), and runs from the moment that its
last page is verified. Its tokens are held back until a router brings the ticket, which it has from the source. Nobody
else tells, so a sequence that its source took back has no reader here, and its lease ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from decode_worker import sequence_state
from decode_worker.request import DecodeRequest, Delta, TokenDelta, one_by_one
from decode_worker.transfers import Transfers
from decode_worker.worker import DecodeWorker
from kv_transfer.lease import Lease, Sweeper
from kv_transfer.session import Manifest
from penstock.errors import Cancelled, InvalidInput, Overloaded, PenstockError
from penstock.types import PageId, TransferId, TransferKey
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

LEASE_S = 5.0  # from its last page to its router: a round trip, unless one of the two has gone
_RETRY_AFTER_S = 1.0


class SourceCall(Protocol):
    """The way back to the source; `decode_worker.adopt_service.AdoptCall`."""

    def destination(self, num_pages_held: int, pages: list[PageId]) -> None: ...

    def landed(self, num_pages: int) -> None: ...

    def adopted(self) -> None: ...

    def refused(self, error: PenstockError) -> None: ...

    def heartbeat(self) -> None: ...


@dataclass(slots=True, eq=False)
class Adoption:
    """One sequence, until its router is here: what the worker's events mean to the source, and the tokens held back."""

    key: TransferKey
    call: SourceCall
    keep: Callable[[Adoption], None]
    num_tokens: int = 0  # when it came: what its router has
    request: DecodeRequest | None = None
    lease: Lease | None = None  # of its router, from the moment that it runs here
    refused: bool = False
    deltas: list[TokenDelta] = field(default_factory=list)
    reader: DecodeRequest | None = None  # of its router, once that is here

    def hold(self, deltas: list[Delta]) -> None:
        """In the place of a router; what was on its way when that came is passed on."""
        self.deltas += one_by_one(deltas)
        if self.reader is not None:
            self.pass_on(self.reader)

    def pass_on(self, reader: DecodeRequest) -> None:
        self.reader = reader
        deltas, self.deltas = self.deltas, []
        if deltas:
            reader.send([replace(delta, stream_id=reader.stream_id) for delta in deltas])

    # `request.Adopter`

    def confirm(self) -> None:
        self.keep(self)
        self.call.adopted()

    def refuse(self, error: PenstockError) -> None:
        if not self.refused:
            self.refused = True
            self.call.refused(error)

    # `transfers.SenderCalls`

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None:
        self.call.destination(num_pages_held, pages)

    def cancel(self, key: TransferKey) -> None:
        self.refuse(Cancelled("the target gave it up"))

    def heartbeat(self, key: TransferKey) -> None:
        self.call.heartbeat()


class Adoptions:
    """Owns the sequences that have no router yet."""

    def __init__(
        self,
        worker: DecodeWorker,
        transfers: Transfers,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._transfers = transfers
        self._lease_s = lease_s
        self._clock = clock
        self._sweeper = Sweeper(lease_s)
        self._asking: dict[TransferKey, tuple[Adoption, worker_pb2.AdoptStart]] = {}  # not answered yet, in order
        self._kept: dict[TransferId, Adoption] = {}
        worker.after_step.append(self._answer)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def ask(self, key: TransferKey, start: worker_pb2.AdoptStart, call: SourceCall) -> None:
        """A source wants to send a sequence: it is told where to, or refused, after the next step."""
        self._asking[key] = Adoption(key, call, self._keep), start

    def _answer(self) -> None:
        # After the step, when who waits to be computed here waits for want of room, and goes first.
        asking, self._asking = self._asking, {}
        for adoption, start in asking.values():
            try:
                self._reserve(adoption, start)
            except PenstockError as error:
                log.info("%s is not taken on: %s", start.state.request_id, error)
                adoption.refuse(error)

    def _reserve(self, adoption: Adoption, start: worker_pb2.AdoptStart) -> None:
        worker, key = self._worker, adoption.key
        if self._transfers.is_known(key) or key.transfer_id in self._kept:
            raise InvalidInput("transfer", f"{key.transfer_id} is known already; give each attempt its own id")
        request = sequence_state.from_wire(start.state, adoption.hold, time.monotonic())
        request.adopter, request.transfer = adoption, key
        worker.take_on(request)
        adoption.request = request
        landed = adoption.call.landed
        if not self._transfers.adopt(key, request, start.num_tokens, worker.scheduler, adoption, landed):
            worker.cancel(request)
            raise Overloaded(f"no room for one more sequence of {start.num_tokens} tokens now", _RETRY_AFTER_S)

    def on_finish(self, key: TransferKey, state: worker_pb2.SequenceState, manifest: Manifest, paused_s: float) -> None:
        """The sequence stands still at its source."""
        request = self._transfers.request_of(key)
        if request is None:
            return
        now_s = time.monotonic()
        try:
            sequence_state.extend(request, state, now_s)
        except InvalidInput as error:
            self._worker.on_lost(key, error)
            return
        request.paused_since_s = now_s - paused_s
        self._transfers.set_num_tokens(key, len(request.sequence.token_ids) - 1)
        self._worker.on_manifest(key, manifest)

    def on_heartbeat(self, key: TransferKey) -> None:
        """The source is still at it."""
        self._transfers.on_heartbeat(key)

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        """The source writes no more. It has handed the sequence over, unless there is an error."""
        self._asking.pop(key, None)
        self._worker.on_closed(key, error)
        if error is not None:
            self._drop(key.transfer_id, error)

    def on_lost(self, key: TransferKey, error: PenstockError) -> None:
        """The call broke. A sequence that runs here by now may have been handed over, so it waits for its router."""
        self._asking.pop(key, None)
        self._worker.on_lost(key, error)

    # Those that run without a router.

    def _keep(self, adoption: Adoption) -> None:
        assert adoption.request is not None
        adoption.num_tokens = len(adoption.request.sequence.token_ids)
        self._kept[adoption.key.transfer_id] = adoption
        adoption.lease = Lease(self._lease_s, self._clock())

    def attach(self, ticket: TransferId, request: DecodeRequest) -> bool:
        """Gives a kept sequence, and what it has drawn since, to the router's `request`; False where there is none."""
        adoption = self._kept.get(ticket)
        if adoption is None:
            return False
        assert adoption.request is not None
        if len(request.sequence.token_ids) != adoption.num_tokens:
            self._drop(ticket, InvalidInput("token_ids", f"the sequence came with {adoption.num_tokens} tokens"))
            return False
        del self._kept[ticket]
        self._worker.replace(adoption.request, request)
        adoption.pass_on(request)
        return True

    def sweep(self, now_s: float) -> float | None:
        """Drops those whose router has not come in time; when to look again."""
        if self._sweeper.is_due(now_s, bool(self._kept)):
            leases = {ticket: one.lease for ticket, one in self._kept.items() if one.lease is not None}
            for ticket in [ticket for ticket, lease in leases.items() if lease.is_over(now_s)]:
                self._drop(ticket, Cancelled(f"no router came for it within {self._lease_s:g} s"))
                del leases[ticket]
            self._sweeper.looked(now_s, (lease.deadline_s for lease in leases.values()))
        return self._sweeper.next_s

    def _drop(self, ticket: TransferId, error: PenstockError) -> None:
        adoption = self._kept.pop(ticket, None)
        if adoption is not None and adoption.request is not None:
            log.info("%s is dropped: %s", adoption.request.sequence.request_id, error)
            self._worker.cancel(adoption.request)
