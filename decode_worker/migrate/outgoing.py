"""Migrates sequences from this worker to other decode workers: the source side. Runs on the step loop.

A sequence continues decoding while its complete pages are pushed. Once few are left it pauses, its last pages and its
state follow, and the target confirms that it holds them all. Only then does the request end here, and its router learns
where the sequence runs. After any earlier failure the sequence resumes here. `closed`, the last message to the target,
says which of the two happened, and that this worker has stopped writing.

Every page in flight stays referenced until the sender is done with it, regardless of its sequence.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from decode_worker.migrate import sequence_state
from decode_worker.migrate.client import MigrationClient, MigrationTarget
from decode_worker.migrate.migration_policy import (
    CopyProgress,
    MigrationCandidate,
    choose_sequences,
    num_tokens_to_reserve,
    should_pause,
)
from decode_worker.request import DecodeRequest
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.step.sequence import Sequence as Generation
from kv_transfer.endpoints import KvSender
from kv_transfer.layout.reshard import ReshardPlan
from kv_transfer.session.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.session.transfer_session import Manifest
from penstock.config import TransferConfig
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, PenstockError, Unavailable
from penstock.types import Epoch, PageId, RequestId, TransferId, TransferKey
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)


class CopyPhase(Enum):
    COPYING = auto()  # the sequence decodes while its complete pages are pushed
    PAUSING = auto()  # it decodes no further, but a step in flight may still compute it
    PAUSED = auto()  # its last pages and its state are on their way


@dataclass(slots=True, eq=False)
class OutgoingMigration:
    """An attempt, which only `OutgoingMigrations` changes. It is settled once it is `accepted` or has an `error`, and
    no longer touches the sequence after that. Page counts refer to the target's pages.
    """

    key: TransferKey
    sequence: Generation  # its request may be replaced, if a router attaches to a migrated sequence
    target: MigrationTarget
    report: Callable[[PenstockError | None], None]  # called once with the outcome
    num_known: int  # number of tokens in the state that the target has
    lease: Lease  # the target's lease
    phase: CopyPhase = CopyPhase.COPYING
    is_open: bool = False  # whether it is open at the sender
    plan: ReshardPlan | None = None  # maps this worker's pages to the target's; set with the destination
    destination: Sequence[PageId] = ()
    num_held: int = 0  # leading pages that the target had in its cache
    num_pushed: int = 0  # including `num_held`, as below
    num_landed: int = 0
    checksums: list[int] = field(default_factory=list)
    shared: dict[int, PageId] = field(default_factory=dict)  # this worker's pages by index, referenced until sent
    first_windowed: int | None = None  # the first page whose windowed part is sent; None: pages are whole
    shared_parts: list[PageId] = field(default_factory=list)  # pages whose windowed part is held until sent
    token_s: float | None = None  # end of the last step before the pause, monotonic
    paused_s: float = 0.0  # start of the pause, monotonic; valid from PAUSED on
    accepted: bool = False
    error: PenstockError | None = None

    @property
    def is_settled(self) -> bool:
        return self.accepted or self.error is not None

    @property
    def num_reserved(self) -> int:
        return self.num_held + len(self.destination)

    @property
    def page_size(self) -> int:
        """The number of tokens in a page of the target."""
        assert self.plan is not None
        return self.plan.target.page_size


class OutgoingMigrations:
    """Owns the attempts and makes them progress."""

    def __init__(
        self,
        engine: Engine,
        worker: DecodeWorker,
        sender: KvSender,
        calls: MigrationClient,
        epoch: Epoch,
        config: TransferConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = engine.pool
        self._page_size = engine.layout.page_size
        self._worker = worker
        self._sender = sender
        self._calls = calls
        self._epoch = epoch
        self._checksums = config.checksums
        self._lease_s = config.timeout_s
        self._clock = clock
        self._sweeper = Sweeper(heartbeat_s(config.timeout_s))
        self._migrations: dict[TransferKey, OutgoingMigration] = {}
        self._unsettled: dict[Generation, OutgoingMigration] = {}
        self.num_migrated = 0

    @property
    def num_open(self) -> int:
        return len(self._migrations)

    def select(self, request_ids: Collection[RequestId], max_sequences: int | None) -> tuple[list[DecodeRequest], int]:
        """Returns the running requests to migrate, and the number of requests that stay."""
        requests = {
            self._candidate(request): request for request in self._worker.requests if self._can_migrate(request)
        }
        chosen = choose_sequences(list(requests), request_ids, max_sequences)
        return [requests[candidate] for candidate in chosen], len(self._worker.requests) - len(chosen)

    def candidates(self) -> list[MigrationCandidate]:
        """Returns the sequences that could migrate now."""
        return [self._candidate(request) for request in self._worker.requests if self._can_migrate(request)]

    def begin(
        self, request: DecodeRequest, target: MigrationTarget, report: Callable[[PenstockError | None], None]
    ) -> None:
        """Starts to migrate a sequence; calls `report` once, with None if it migrated."""
        sequence = request.sequence
        if not self._can_migrate(request):
            reason = "has ended, is already migrating or waits for its KV"
            if sequence.has_gap:
                reason = "has released pages between its attention sinks and its window, and stays until it ends"
            report(Unavailable(f"{sequence.request_id} {reason}"))
            return
        key = TransferKey(TransferId(uuid.uuid4().hex), self._epoch, target.epoch)
        lease = Lease(self._lease_s, self._clock())
        migration = OutgoingMigration(key, sequence, target, report, len(sequence.token_ids), lease)
        self._migrations[key] = self._unsettled[sequence] = migration
        state = sequence_state.to_wire(request, self._worker.timing(request), time.monotonic())
        num_tokens_left = self._worker.num_tokens_left(sequence)
        num_tokens = num_tokens_to_reserve(len(sequence.token_ids), num_tokens_left, self._page_size)
        self._worker.scheduler.keep_whole(sequence, keeps=True)  # pages that the target awaits must not be dropped
        self._calls.start(key, target, state, num_tokens, self._num_dropped_tokens(sequence), events=self)

    def _num_dropped_tokens(self, sequence: Generation) -> int:
        return sequence.num_dropped * self._page_size

    def _can_migrate(self, request: DecodeRequest) -> bool:
        sequence = request.sequence
        is_free = sequence not in self._unsettled and not sequence.has_gap
        return is_free and self._worker.scheduler.is_running(sequence)

    def _candidate(self, request: DecodeRequest) -> MigrationCandidate:
        sequence = request.sequence
        num_tokens_left = self._worker.num_tokens_left(sequence)
        return MigrationCandidate(sequence.request_id, len(sequence.token_ids), num_tokens_left)

    # Events of the target (`TargetEvents`).

    def on_destination(
        self, key: TransferKey, offer: bytes, num_held: int, pages: Sequence[PageId], window_slots: Sequence[int] = ()
    ) -> None:
        migration = self._migrations.get(key)
        if migration is None or migration.is_settled or migration.plan is not None:
            return
        try:
            migration.plan = self._sender.open(key, offer, migration.sequence.lane)
        except PenstockError as error:
            self._fail(migration, error)
            return
        migration.is_open, migration.destination = True, pages
        if num_held * migration.page_size > migration.sequence.num_computed_tokens:
            self._fail(migration, InvalidInput("num_pages_held", f"is {num_held}, more than the sequence has"))
            return
        if num_held * migration.page_size < self._num_dropped_tokens(migration.sequence):
            self._fail(
                migration, InvalidInput("num_pages_held", f"is {num_held}; pages from there on are dropped here")
            )
            return
        first_windowed = num_held + len(pages) - len(window_slots)
        if self._pool.parts is not None:
            if not max(num_held, migration.sequence.num_stripped) <= first_windowed:
                self._fail(migration, InvalidInput("window_slots", "are given for pages without windowed parts here"))
                return
            self._sender.place(key, num_held, pages, window_slots)
            migration.first_windowed = first_windowed
        migration.num_held = migration.num_pushed = migration.num_landed = num_held
        self._advance(migration)

    def on_landed(self, key: TransferKey, num_pages: int) -> None:
        migration = self._migrations.get(key)
        if migration is not None:
            migration.lease.renew(self._clock())
            migration.num_landed = max(migration.num_landed, migration.num_held + num_pages)
            self._advance(migration)

    def on_heartbeat(self, key: TransferKey) -> None:
        """Renews the target's lease."""
        migration = self._migrations.get(key)
        if migration is not None:
            migration.lease.renew(self._clock())

    def on_accepted(self, key: TransferKey) -> None:
        """Ends the request here, because the target has verified every page and runs the sequence."""
        migration = self._migrations.get(key)
        if migration is None or migration.is_settled or migration.phase is not CopyPhase.PAUSED:
            return
        migration.accepted = True
        del self._unsettled[migration.sequence]
        self.num_migrated += 1
        target, request = migration.target, self._worker.request_of(migration.sequence)
        assert request is not None  # otherwise the attempt would have been abandoned
        migrated = worker_pb2.Migrated(
            worker_id=target.worker_id, epoch=target.epoch, address=target.address, ticket=key.transfer_id
        )
        self._worker.release_migrated(request, migrated)
        log.info(
            "%s migrated to %s: %d pages, paused for %.1f ms",
            migration.sequence.request_id,
            target.worker_id,
            migration.num_pushed - migration.num_held,
            (time.monotonic() - migration.paused_s) * 1e3,
        )
        migration.report(None)
        self._close_if_over(migration)

    def on_failed(self, key: TransferKey, error: PenstockError) -> None:
        """Gives up the attempt, because the target refused, the call broke, an answer is overdue or the transport
        failed.
        """
        migration = self._migrations.get(key)
        if migration is not None:
            self._fail(migration, error)

    def sweep(self, now_s: float) -> float | None:
        """Sends heartbeats and gives up attempts whose target is silent. Returns when to sweep again."""
        if self._sweeper.is_due(now_s, bool(self._migrations)):
            for migration in list(self._unsettled.values()):
                if migration.lease.is_over(now_s):
                    silent = f"{migration.target.worker_id} has been silent for {self._lease_s:g} s"
                    self._fail(migration, DeadlineExceeded(silent))
                else:
                    self._calls.heartbeat(migration.key)
            self._sweeper.looked(now_s, (migration.lease.deadline_s for migration in self._unsettled.values()))
        return self._sweeper.next_s

    # Events of the sender.

    def on_sent(self, key: TransferKey) -> None:
        """Releases the attempt's pages after its last push."""
        migration = self._migrations.get(key)
        if migration is not None:
            migration.is_open = False
            self._pool.release(list(migration.shared.values()), migration.shared_parts)
            migration.shared, migration.shared_parts = {}, []
            self._close_if_over(migration)

    # Copying.

    def advance(self) -> None:
        """Makes every migration progress. Call it after each step."""
        now_s = time.monotonic()
        for migration in list(self._unsettled.values()):
            if migration.phase is not CopyPhase.PAUSED:
                migration.token_s = now_s
            self._advance(migration)

    def _advance(self, migration: OutgoingMigration) -> None:
        """Pushes complete pages. Pauses the sequence once few are left, and finishes when no step computes it."""
        if migration.is_settled or migration.phase is CopyPhase.PAUSED:
            return
        sequence, scheduler = migration.sequence, self._worker.scheduler
        if migration.phase is CopyPhase.PAUSING:
            if scheduler.is_at_rest(sequence):
                self._finish(migration)
        elif not scheduler.is_running(sequence):
            self._fail(migration, Unavailable(f"{sequence.request_id} was preempted; it has no pages to migrate now"))
        elif migration.plan is not None:
            num_full = sequence.num_computed_tokens // migration.page_size
            self._push(migration, min(num_full, migration.num_reserved))
            progress = CopyProgress(num_full, migration.num_held, migration.num_landed, migration.num_reserved)
            if should_pause(progress):
                migration.phase = CopyPhase.PAUSING
                scheduler.pause(sequence)
                self._advance(migration)

    def _push(self, migration: OutgoingMigration, end: int) -> None:
        """Sends the tokens that fill the target's pages of the sequence up to page `end`."""
        first, held, size = migration.num_pushed, migration.num_held, migration.page_size
        if end <= first:
            return
        pages = migration.sequence.pages
        tokens = range(first * size, min(end * size, migration.sequence.num_computed_tokens))
        indexes = range(tokens.start // self._page_size, -(-tokens.stop // self._page_size))
        fresh = {index: pages[index] for index in indexes if index not in migration.shared}
        windowed: list[PageId] = []
        if migration.first_windowed is not None:
            windowed = [page for index, page in fresh.items() if index >= migration.first_windowed]
        self._pool.share(list(fresh.values()), windowed)
        migration.shared |= fresh
        migration.shared_parts += windowed
        if self._checksums:
            migration.checksums += self._sender.sent_checksums(migration.key, tokens, pages)
        destination = migration.destination[first - held : end - held]
        self._sender.push_tokens(migration.key, first - held, tokens, pages, destination)
        migration.num_pushed = end

    def _finish(self, migration: OutgoingMigration) -> None:
        """Sends the remaining pages and the state of the paused sequence."""
        sequence, size = migration.sequence, migration.page_size
        num_tokens = sequence.num_computed_tokens
        num_pages = -(-num_tokens // size)
        if num_pages > migration.num_reserved:
            outgrew = f"{sequence.request_id} outgrew the {migration.num_reserved} pages reserved"
            self._fail(migration, Unavailable(outgrew))
            return
        migration.phase, migration.paused_s = CopyPhase.PAUSED, time.monotonic()
        self._push(migration, num_pages)
        self._sender.finish(migration.key)
        manifest = Manifest(
            num_tokens=num_tokens,
            num_pages=num_pages - migration.num_held,
            page_hashes=tuple(sequence.hashes_for(size, self._page_size)[migration.num_held : num_tokens // size]),
            checksums=tuple(migration.checksums),
        )
        request, now_s = self._worker.request_of(sequence), time.monotonic()
        assert request is not None  # it is paused but has not ended
        state = sequence_state.to_wire(request, self._worker.timing(request), now_s, migration.num_known)
        paused_s = 0.0 if migration.token_s is None else now_s - migration.token_s
        self._calls.finish(migration.key, state, manifest, paused_s)

    # The end.

    def abandon(self, request: DecodeRequest) -> None:
        """Gives up the migration of a request that has ended here."""
        migration = self._unsettled.get(request.sequence)
        if migration is not None:
            self._fail(migration, Cancelled(f"{request.sequence.request_id} has ended"))

    def _fail(self, migration: OutgoingMigration, error: PenstockError) -> None:
        """Settles the attempt with an error. The sequence continues here unless it has ended."""
        if migration.is_settled:
            return
        migration.error = error
        del self._unsettled[migration.sequence]
        self._worker.scheduler.keep_whole(migration.sequence, keeps=False)
        log.info("%s did not migrate to %s: %s", migration.sequence.request_id, migration.target.worker_id, error)
        if migration.phase is not CopyPhase.COPYING and self._worker.request_of(migration.sequence) is not None:
            self._worker.scheduler.resume(migration.sequence)
        migration.report(error)
        if migration.is_open:
            self._sender.abort(migration.key)
        self._close_if_over(migration)

    def _close_if_over(self, migration: OutgoingMigration) -> None:
        """Notifies the target and forgets the attempt once it is settled and its last write is over."""
        if migration.is_settled and not migration.is_open:
            del self._migrations[migration.key]
            self._calls.close(migration.key, migration.error)
