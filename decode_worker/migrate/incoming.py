"""Receives sequences that migrate here from other decode workers, and keeps them for their routers. Runs on the step
loop.

A sequence gets reserved pages, arrives page by page like a prompt's KV (`TransferTable`), and runs as soon as its last
page is verified. Its tokens are held back until its router brings the ticket from the source. If the source has resumed
the sequence, no router has the ticket, and the lease ends the sequence here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from decode_worker.migrate import sequence_state
from decode_worker.prefill.transfer_table import TransferTable
from decode_worker.request import DecodeRequest, Delta, TokenDelta, split_plain
from decode_worker.worker import DecodeWorker
from kv_transfer.session.lease import Lease, Sweeper
from kv_transfer.session.transfer_session import Manifest
from penstock.errors import Cancelled, InvalidInput, Overloaded, PenstockError
from penstock.types import PageId, TransferId, TransferKey
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

LEASE_S = 5.0  # from the last page to the router's call, normally one round trip
_RETRY_AFTER_S = 1.0


class SourceCall(Protocol):
    """Sends events to the source; `decode_worker.migrate.service.SourceStream` implements it."""

    def destination(self, num_pages_held: int, pages: list[PageId]) -> None: ...

    def landed(self, num_pages: int) -> None: ...

    def accepted(self) -> None: ...

    def refused(self, error: PenstockError) -> None: ...

    def heartbeat(self) -> None: ...


@dataclass(eq=False)
class IncomingMigration:
    """A sequence whose router has not attached yet: translates the worker's events for the source, and holds tokens
    back.

    It serves as the request's `PendingMigration`, as its `DeltaStream` until a router attaches, and as its transfer's
    `SenderCalls`.
    """

    key: TransferKey
    call: SourceCall
    on_running: Callable[[IncomingMigration], None]  # called once every page is verified
    num_tokens: int = 0  # number of tokens when it began to run here, all of which its router has
    request: DecodeRequest | None = None
    lease: Lease | None = None  # its router's lease, from the start of the sequence here
    is_refused: bool = False
    held: list[TokenDelta] = field(default_factory=list)
    reader: DecodeRequest | None = None  # its router's request, set when the router attaches

    def send(self, deltas: list[Delta]) -> None:
        """Holds deltas back, or passes on those that were in flight when the router attached."""
        self.held += split_plain(deltas)
        if self.reader is not None:
            self.pass_on(self.reader)

    def pass_on(self, reader: DecodeRequest) -> None:
        self.reader = reader
        deltas, self.held = self.held, []
        if deltas:
            reader.stream.send([replace(delta, stream_id=reader.stream_id) for delta in deltas])

    def confirm(self) -> None:
        self.on_running(self)
        self.call.accepted()

    def refuse(self, error: PenstockError) -> None:
        if not self.is_refused:
            self.is_refused = True
            self.call.refused(error)

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None:
        self.call.destination(num_pages_held, pages)

    def cancel(self, key: TransferKey) -> None:
        self.refuse(Cancelled("the target gave up the migration"))

    def heartbeat(self, key: TransferKey) -> None:
        self.call.heartbeat()


class IncomingMigrations:
    """Owns the sequences that have no router yet."""

    def __init__(
        self,
        worker: DecodeWorker,
        transfers: TransferTable,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._transfers = transfers
        self._lease_s = lease_s
        self._clock = clock
        self._sweeper = Sweeper(lease_s)
        self._unanswered: dict[TransferKey, tuple[IncomingMigration, worker_pb2.MigrationStart]] = {}  # by arrival
        self._kept: dict[TransferId, IncomingMigration] = {}

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def on_start(self, key: TransferKey, start: worker_pb2.MigrationStart, call: SourceCall) -> None:
        """Queues a source's request to send a sequence; after the next step it gets a destination or a refusal."""
        self._unanswered[key] = IncomingMigration(key, call, self._keep), start

    def answer(self) -> None:
        """Reserves pages for sequences that began to arrive during a step. Call it after each step: sequences that
        still wait here need room, and go first.
        """
        unanswered, self._unanswered = self._unanswered, {}
        for migration, start in unanswered.values():
            try:
                self._reserve(migration, start)
            except PenstockError as error:
                log.info("refused the migration of %s: %s", start.state.request_id, error)
                migration.refuse(error)

    def _reserve(self, migration: IncomingMigration, start: worker_pb2.MigrationStart) -> None:
        worker, key = self._worker, migration.key
        if self._transfers.owns(key) or key.transfer_id in self._kept:
            raise InvalidInput("transfer", f"{key.transfer_id} is already known; give each attempt its own id")
        request = sequence_state.from_wire(start.state, migration, time.monotonic())
        num_known = len(request.sequence.token_ids)
        if start.num_tokens < num_known:
            raise InvalidInput("num_tokens", f"is {start.num_tokens}; give at least the sequence's own {num_known}")
        request.migration, request.transfer = migration, key
        worker.accept(request)
        migration.request = request
        landed = migration.call.landed
        try:
            num_unneeded = self._transfers.num_unneeded(request.sequence, start.num_dropped_tokens)
            if not self._transfers.receive(
                key, request, start.num_tokens, worker.scheduler, migration, landed, num_unneeded
            ):
                raise Overloaded(f"no room for one more sequence of {start.num_tokens} tokens now", _RETRY_AFTER_S)
        except PenstockError:
            worker.cancel(request)
            raise

    def on_finish(self, key: TransferKey, state: worker_pb2.SequenceState, manifest: Manifest, paused_s: float) -> None:
        """Takes the final state and the manifest of a sequence that has paused at its source."""
        request = self._transfers.request_of(key)
        if request is None:
            return
        now_s = time.monotonic()
        try:
            sequence_state.extend(request, state, now_s)
            self._worker.check_tokens(request.sequence)
        except InvalidInput as error:
            assert request.migration is not None
            request.migration.refuse(error)
            self._worker.on_lost(key, error)
            return
        request.paused_since_s = now_s - paused_s
        num_tokens = len(request.sequence.token_ids) - 1
        if request.sequence.sampling.grammar is not None:  # tokens that a grammar forced may have no KV yet
            num_tokens = min(num_tokens, manifest.num_tokens)
        self._transfers.set_num_tokens(key, num_tokens)
        self._worker.on_manifest(key, manifest)

    def on_heartbeat(self, key: TransferKey) -> None:
        """Renews the source's lease."""
        self._transfers.on_heartbeat(key)

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        """Ends the transfer, because the source has stopped writing. Without an error this worker now owns the
        sequence.
        """
        self._unanswered.pop(key, None)
        self._worker.on_closed(key, error)
        if error is not None:
            self._drop(key.transfer_id, error)

    def on_lost(self, key: TransferKey, error: PenstockError) -> None:
        """Stops waiting for a source whose call broke. A sequence that already runs here waits for its router, since
        the source may have given it up.
        """
        self._unanswered.pop(key, None)
        self._worker.on_lost(key, error)

    # Sequences that run without a router.

    def _keep(self, migration: IncomingMigration) -> None:
        assert migration.request is not None
        migration.num_tokens = len(migration.request.sequence.token_ids)
        self._kept[migration.key.transfer_id] = migration
        migration.lease = Lease(self._lease_s, self._clock())

    def attach(self, ticket: TransferId, request: DecodeRequest) -> bool:
        """Gives a kept sequence and its tokens to the router's `request`. Returns False if there is none."""
        migration = self._kept.get(ticket)
        if migration is None:
            return False
        assert migration.request is not None
        if len(request.sequence.token_ids) != migration.num_tokens:
            self._drop(
                ticket,
                InvalidInput(
                    "token_ids", f"continue another sequence: the migrated one has {migration.num_tokens} tokens"
                ),
            )
            return False
        del self._kept[ticket]
        self._worker.replace(migration.request, request)
        migration.pass_on(request)
        return True

    def sweep(self, now_s: float) -> float | None:
        """Drops sequences whose router has not come in time. Returns when to sweep again."""
        if self._sweeper.is_due(now_s, bool(self._kept)):
            leases = {ticket: kept.lease for ticket, kept in self._kept.items() if kept.lease is not None}
            for ticket in [ticket for ticket, lease in leases.items() if lease.is_over(now_s)]:
                self._drop(ticket, Cancelled(f"no router came for it within {self._lease_s:g} s"))
                del leases[ticket]
            self._sweeper.looked(now_s, (lease.deadline_s for lease in leases.values()))
        return self._sweeper.next_s

    def _drop(self, ticket: TransferId, error: PenstockError) -> None:
        migration = self._kept.pop(ticket, None)
        if migration is not None and migration.request is not None:
            log.info("dropped %s: %s", migration.request.sequence.request_id, error)
            self._worker.cancel(migration.request)
