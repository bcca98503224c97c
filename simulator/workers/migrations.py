"""Models migrations of running sequences between decode workers in virtual time.

Follows `decode_worker.migrate` around its real decisions: a sequence decodes while its complete pages are pushed, then
pauses for the last ones. The target verifies all pages and runs the sequence, and only then does the source release it.
Until its router comes with the ticket, the target keeps the sequence and its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.migrate.migration_policy import CopyProgress, num_tokens_to_reserve, should_pause
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.cache.page_pool import PagePool
from engine.step.sequence import Sequence
from kv_transfer.session.transfer_session import Manifest
from penstock.errors import Cancelled, Overloaded, PenstockError, TransferError, Unavailable
from penstock.types import PageId, TransferId, TransferKey, WorkerId
from simulator.workers.submission import Delta, MigratedTo, Submission
from simulator.workers.transfers import TransferModel
from simulator.world.kv_links import KvLinks
from simulator.world.network import Call, Network, Node
from simulator.world.virtual_time import Timer

_KEPT_S = 10.0  # time that a sequence waits for its router


class MigrationOwner(Protocol):
    """A decode worker as its migrations see it. Everything runs on its step loop."""

    node: Node
    worker_id: WorkerId
    page_size: int
    pool: PagePool
    scheduler: DecodeScheduler
    transfers: TransferModel

    def post(self, call: Callable[[], None]) -> None: ...

    def holds(self, submission: Submission) -> bool: ...

    def take(self, submission: Submission) -> bool:
        """Tracks a sequence whose pages arrive; returns False if this worker holds too many."""
        ...

    def leave(self, submission: Submission, to: MigratedTo) -> None:
        """Ends a request here, because it runs elsewhere."""
        ...

    def drop(self, submission: Submission) -> None: ...


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A migration at its source. Page counts refer to the sequence's pages from the first."""

    key: TransferKey
    submission: Submission
    target: MigrationModel
    call: Call | None = None
    num_reserved: int | None = None  # None until the target has answered
    num_held: int = 0  # pages that the target had cached
    num_pushed: int = 0
    num_landed: int = 0
    num_pushes: int = 0  # in flight
    shared: list[PageId] = field(default_factory=list)  # pages referenced until no push is in flight
    paused: bool = False
    settled: bool = False
    error: PenstockError | None = None


@dataclass(slots=True, eq=False)
class _Incoming:
    """A sequence at its target, until its router has come or it is given up."""

    key: TransferKey
    submission: Submission
    source: MigrationModel
    call: Call
    num_tokens: int = 0  # its tokens when it paused at its source
    runs: bool = False
    deltas: list[Delta] = field(default_factory=list)  # updates kept for the router
    timer: Timer | None = None


class MigrationModel:
    """Both sides of one worker's migrations."""

    def __init__(self, owner: MigrationOwner, network: Network, links: KvLinks) -> None:
        self.num_migrated = 0  # sequences that have migrated away
        self._owner = owner
        self._network = network
        self._links = links
        self._number = 0
        self._outgoing: dict[TransferKey, _Outgoing] = {}
        self._incoming: dict[TransferKey, _Incoming] = {}

    @property
    def num_open(self) -> int:
        return len(self._outgoing) + len(self._incoming)

    def is_open(self, key: TransferKey) -> bool:
        """Returns whether this source may still write pages of the attempt."""
        return key in self._outgoing

    # The source.

    def begin(self, submission: Submission, target: MigrationModel) -> None:
        """Starts to migrate a running sequence, unless it has ended, does not run, or migrates already."""
        self._owner.post(lambda: self._begin(submission, target))

    def _begin(self, submission: Submission, target: MigrationModel) -> None:
        owner, sequence = self._owner, submission.sequence
        is_migrating = any(not each.settled and each.submission is submission for each in self._outgoing.values())
        if is_migrating or not owner.holds(submission) or not owner.scheduler.is_running(sequence):
            return
        self._number += 1
        key = TransferKey(
            TransferId(f"{owner.node.name}-migration-{self._number}"), owner.node.epoch, target._owner.node.epoch
        )
        outgoing = self._outgoing[key] = _Outgoing(key, submission, target)
        outgoing.call = call = self._network.call(
            owner.node,
            target._owner.node,
            lambda: owner.post(lambda: self._fail(key, Unavailable("lost the target of a migration"))),
            lambda: target._owner.post(lambda: target._lose(key)),
        )
        if call is not None:
            num_left = sequence.num_prompt_tokens + sequence.sampling.max_tokens - len(sequence.token_ids)
            num_tokens = num_tokens_to_reserve(len(sequence.token_ids), num_left, owner.page_size)
            left_s = (
                submission.timer.time_s - owner.node.sim.now_s if submission.timer is not None else submission.timeout_s
            )
            copy = submission.copy(left_s)
            call.send(owner.node, lambda: target.on_start(key, copy, num_tokens, self, call))

    def on_destination(self, key: TransferKey, num_held: int, num_reserved: int) -> None:
        self._owner.post(lambda: self._take_destination(key, num_held, num_reserved))

    def _take_destination(self, key: TransferKey, num_held: int, num_reserved: int) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None and not outgoing.settled:
            outgoing.num_reserved = num_reserved
            outgoing.num_held = outgoing.num_pushed = outgoing.num_landed = num_held
            self._advance(outgoing)

    def advance_all(self) -> None:
        """Advances every migration after a step."""
        for outgoing in list(self._outgoing.values()):
            self._advance(outgoing)

    def _advance(self, outgoing: _Outgoing) -> None:
        """Pushes complete pages. Pauses the sequence once few are left, and finishes."""
        if outgoing.settled or outgoing.paused or outgoing.num_reserved is None:
            return
        scheduler, sequence = self._owner.scheduler, outgoing.submission.sequence
        if not self._owner.holds(outgoing.submission) or not scheduler.is_running(sequence):
            self._fail(outgoing.key, Unavailable("the sequence was preempted or has ended"))
            return
        num_full = sequence.num_computed_tokens // self._owner.page_size
        self._push(outgoing, min(num_full, outgoing.num_reserved))
        progress = CopyProgress(num_full, outgoing.num_held, outgoing.num_landed, outgoing.num_reserved)
        if should_pause(progress) and scheduler.is_at_rest(sequence):
            self._finish(outgoing)

    def _push(self, outgoing: _Outgoing, end: int) -> None:
        first, owner, key = outgoing.num_pushed, self._owner, outgoing.key
        if end <= first:
            return
        pages = outgoing.submission.sequence.pages[first:end]
        owner.pool.share(pages)
        outgoing.shared += pages
        outgoing.num_pushed, outgoing.num_pushes = end, outgoing.num_pushes + 1
        target = outgoing.target

        def landed() -> None:
            target._owner.transfers.on_written(key, first - outgoing.num_held, end - first)
            owner.node.post(lambda: owner.post(lambda: settle(None)))

        def settle(error: PenstockError | None) -> None:
            outgoing.num_pushes -= 1
            if error is not None:
                self._fail(key, error)
            outgoing.num_landed += end - first
            self._advance(outgoing)
            self._close_if_over(outgoing)

        def failed() -> None:
            error = TransferError("the target of a migration is out of reach")
            owner.node.post(lambda: owner.post(lambda: settle(error)))

        num_tokens = (end - first) * owner.page_size
        self._links.push(owner.node, target._owner.node, num_tokens, landed, failed)

    def _finish(self, outgoing: _Outgoing) -> None:
        """Pauses the sequence, and sends the remaining pages and the manifest that the target checks."""
        owner, sequence, key = self._owner, outgoing.submission.sequence, outgoing.key
        num_tokens = sequence.num_computed_tokens
        num_pages = -(-num_tokens // owner.page_size)
        assert outgoing.num_reserved is not None
        if num_pages > outgoing.num_reserved:
            self._fail(key, Unavailable(f"the sequence outgrew the {outgoing.num_reserved} pages reserved"))
            return
        outgoing.paused = True
        owner.scheduler.pause(sequence)
        self._push(outgoing, num_pages)
        hashes = tuple(sequence.hash_full_pages(owner.page_size)[outgoing.num_held : num_tokens // owner.page_size])
        manifest = Manifest(num_tokens, num_pages - outgoing.num_held, hashes)
        length, target = len(sequence.token_ids), outgoing.target
        if outgoing.call is not None:
            outgoing.call.send(owner.node, lambda: target.on_finish(key, length, manifest))

    def on_accepted(self, key: TransferKey) -> None:
        self._owner.post(lambda: self._accept(key))

    def _accept(self, key: TransferKey) -> None:
        """Ends the request here: the target has verified every page and runs the sequence."""
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.settled or not outgoing.paused:
            return
        outgoing.settled = True
        self.num_migrated += 1
        self._owner.leave(outgoing.submission, MigratedTo(outgoing.target._owner.worker_id, key))
        self._close_if_over(outgoing)

    def on_refused(self, key: TransferKey, error: PenstockError) -> None:
        self._owner.post(lambda: self._fail(key, error))

    def abandon(self, submission: Submission) -> None:
        """Gives up the migration of a request that has ended here."""
        for outgoing in list(self._outgoing.values()):
            if outgoing.submission is submission:
                self._fail(outgoing.key, Cancelled("the request has ended"))

    def cancel(self, key: TransferKey) -> None:
        self.on_refused(key, Cancelled("the target gave the migration up"))

    def _fail(self, key: TransferKey, error: PenstockError) -> None:
        """Settles an attempt with an error. The sequence continues here unless it has ended."""
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.settled:
            return
        outgoing.settled, outgoing.error = True, error
        if outgoing.paused and self._owner.holds(outgoing.submission):
            self._owner.scheduler.resume(outgoing.submission.sequence)
        self._close_if_over(outgoing)

    def _close_if_over(self, outgoing: _Outgoing) -> None:
        """Notifies the target once the attempt is settled and nothing is written any more."""
        key, error, target = outgoing.key, outgoing.error, outgoing.target
        if outgoing.settled and not outgoing.num_pushes and self._outgoing.pop(key, None) is not None:
            self._owner.pool.release(outgoing.shared)
            if outgoing.call is not None:
                outgoing.call.send(self._owner.node, lambda: target.on_closed(key, error))

    # The target.

    def on_start(
        self, key: TransferKey, submission: Submission, num_tokens: int, source: MigrationModel, call: Call
    ) -> None:
        self._owner.post(lambda: self._start(_Incoming(key, submission, source, call), num_tokens))

    def _start(self, incoming: _Incoming, num_tokens: int) -> None:
        owner, key, submission = self._owner, incoming.key, incoming.submission
        submission.send = incoming.deltas.extend
        found = None
        if owner.take(submission):
            found = owner.transfers.receive(
                key, submission.sequence, num_tokens, incoming.source._owner.worker_id, incoming.call
            )
            if found is None:
                owner.drop(submission)
        if found is None:
            self._refuse(incoming, Overloaded("no room for one more sequence", None))
            return
        self._incoming[key] = incoming
        incoming.call.send(owner.node, lambda: incoming.source.on_destination(key, *found))

    def _refuse(self, incoming: _Incoming, error: PenstockError) -> None:
        incoming.call.send(self._owner.node, lambda: incoming.source.on_refused(incoming.key, error))

    def on_finish(self, key: TransferKey, length: int, manifest: Manifest) -> None:
        self._owner.post(lambda: self._take_end(key, length, manifest))

    def _take_end(self, key: TransferKey, length: int, manifest: Manifest) -> None:
        incoming = self._incoming.get(key)
        if incoming is None or not self._owner.holds(incoming.submission):
            return
        tokens = incoming.submission.tokens
        tokens.extend_by(length - len(tokens))
        incoming.num_tokens = incoming.submission.num_sent = length
        self._owner.transfers.finish(key, manifest)

    def on_joined(self, sequence: Sequence) -> bool:
        """Notes that all pages of a sequence have arrived. Returns whether it has migrated here."""
        incoming = self._find(sequence)
        if incoming is not None:
            incoming.runs = True
            incoming.timer = self._owner.node.after(_KEPT_S, lambda: self._owner.post(lambda: self._drop(incoming.key)))
            incoming.call.send(self._owner.node, lambda: incoming.source.on_accepted(incoming.key))
        return incoming is not None

    def on_transfer_failed(self, sequence: Sequence, error: PenstockError | None) -> bool:
        """Gives up a sequence whose pages do not arrive. Returns whether it was migrating here."""
        incoming = self._find(sequence)
        if incoming is None:
            return False
        self._drop(incoming.key)
        self._refuse(incoming, error or Cancelled("the source gave the migration up"))
        return True

    def _find(self, sequence: Sequence) -> _Incoming | None:
        found = (each for each in self._incoming.values() if each.submission.sequence is sequence)
        return next(found, None)

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        """Ends the transfer: the source writes no more, and without an error this worker owns the sequence."""
        self._owner.transfers.on_closed(key, error)
        if error is not None:
            self._owner.post(lambda: self._drop(key))

    def _lose(self, key: TransferKey) -> None:
        """Stops waiting for a source whose call broke; a sequence that runs here waits for its router."""
        self._owner.transfers.lose(key)

    def attach(self, ticket: TransferKey, num_tokens: int) -> tuple[Submission, Iterable[Delta]] | None:
        """Returns a kept sequence and its tokens since, for a router that has `num_tokens`; None if it is not kept."""
        incoming = self._incoming.get(ticket)
        if incoming is None or not incoming.runs:
            return None
        if incoming.num_tokens != num_tokens:
            self._drop(ticket)
            return None
        self._forget(ticket)
        return incoming.submission, incoming.deltas

    def _drop(self, key: TransferKey) -> None:
        incoming = self._forget(key)
        if incoming is not None and self._owner.holds(incoming.submission):
            self._owner.drop(incoming.submission)

    def _forget(self, key: TransferKey) -> _Incoming | None:
        incoming = self._incoming.pop(key, None)
        if incoming is not None and incoming.timer is not None:
            incoming.timer.cancel()
        return incoming
