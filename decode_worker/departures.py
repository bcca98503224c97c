"""Sequences on their way from here to another decode worker. Runs on the step loop, no gRPC.

A sequence goes on decoding while its complete pages are pushed. Once few are left it stands still, its last pages and
its state follow, and the target confirms that it holds them all. Only then does the request end here, with the news
where it has moved; whatever fails before, it runs on as if nothing had been. `closed`, the last word to the target,
says which of the two came to be, and that nothing is written any more.

Every page under way is referenced until the sender is done with it, whatever becomes of its sequence meanwhile.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from decode_worker import sequence_state
from decode_worker.departure import Departure, Target
from decode_worker.migration import Candidate, CopyProgress, choose, room_wanted, should_stop
from decode_worker.request import DecodeRequest, Moved
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.sequence import Sequence as Generation
from kv_transfer.group_sender import GroupSender
from kv_transfer.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.reshard import Plan
from kv_transfer.session import Manifest
from penstock.config import TransferConfig
from penstock.errors import Cancelled, DeadlineExceeded, InvalidInput, PenstockError, Unavailable
from penstock.page_hash import hash_pages
from penstock.types import Epoch, PageHash, PageId, RequestId, TransferId, TransferKey
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)


class AdoptCalls(Protocol):
    """The way to targets; `decode_worker.adopt_client.AdoptClient`."""

    def start(self, key: TransferKey, target: Target, state: worker_pb2.SequenceState, num_tokens: int) -> None: ...

    def finish(
        self, key: TransferKey, state: worker_pb2.SequenceState, manifest: Manifest, paused_s: float
    ) -> None: ...

    def heartbeat(self, key: TransferKey) -> None: ...

    def close(self, key: TransferKey, error: PenstockError | None) -> None: ...


class Departures:
    """Owns the attempts."""

    def __init__(
        self,
        engine: Engine,
        worker: DecodeWorker,
        sender: GroupSender,
        epoch: Epoch,
        config: TransferConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = engine.pool
        self._page_size = engine.layout.page_size
        self._worker = worker
        self._sender = sender
        self._epoch = epoch
        self._checksums = config.checksums
        self._lease_s = config.timeout_s
        self._clock = clock
        self._sweeper = Sweeper(heartbeat_s(config.timeout_s))
        self._departures: dict[TransferKey, Departure] = {}
        self.calls: AdoptCalls | None = None
        self.num_moved = 0
        self.num_failed = 0
        worker.after_step.append(self._advance_all)
        worker.on_release.append(self._abandon)

    @property
    def num_open(self) -> int:
        return len(self._departures)

    def select(self, request_ids: Collection[RequestId], max_sequences: int | None) -> tuple[list[DecodeRequest], int]:
        """Which running sequences to move, and how many requests are left alone."""
        movable = {self._candidate(request): request for request in self._worker.requests if self._is_movable(request)}
        chosen = choose(list(movable), request_ids, max_sequences)
        return [movable[one] for one in chosen], len(self._worker.requests) - len(chosen)

    def candidates(self) -> list[Candidate]:
        """Those that could move now."""
        return [self._candidate(request) for request in self._worker.requests if self._is_movable(request)]

    def begin(self, request: DecodeRequest, target: Target, report: Callable[[PenstockError | None], None]) -> None:
        """Starts to move a sequence; `report` hears once how it went: None where it moved."""
        assert self.calls is not None
        sequence = request.sequence
        if not self._is_movable(request):
            report(Unavailable(f"{sequence.request_id} has ended, moves already or waits for its KV"))
            return
        key = TransferKey(TransferId(uuid.uuid4().hex), self._epoch, target.epoch)
        lease = Lease(self._lease_s, self._clock())
        self._departures[key] = Departure(key, sequence, target, report, len(sequence.token_ids), lease)
        one = self._candidate(request)
        state = sequence_state.to_wire(request, self._worker.timing(request), time.monotonic())
        room = room_wanted(one.num_tokens, one.num_tokens_left, self._page_size)
        self.calls.start(key, target, state, room)

    def _is_movable(self, request: DecodeRequest) -> bool:
        sequence = request.sequence
        moving = any(one.sequence is sequence and not one.has_outcome for one in self._departures.values())
        return not moving and self._worker.scheduler.is_running(sequence)

    def _candidate(self, request: DecodeRequest) -> Candidate:
        sequence = request.sequence
        return Candidate(sequence.request_id, len(sequence.token_ids), self._worker.num_tokens_left(sequence))

    # What the target says.

    def on_destination(self, key: TransferKey, offer: bytes, num_held: int, pages: Sequence[PageId]) -> None:
        one = self._departures.get(key)
        if one is None or one.has_outcome or one.plan is not None:
            return
        try:
            one.plan = self._sender.open(key, offer, one.sequence.lane)
        except PenstockError as error:
            self._fail(one, error)
            return
        one.is_open, one.destination = True, pages
        if num_held * one.page_size > one.sequence.num_computed_tokens:
            self._fail(one, InvalidInput("num_pages_held", f"is {num_held}, more than the sequence has"))
            return
        one.num_held = one.num_pushed = one.num_landed = num_held
        self._advance(one)

    def on_landed(self, key: TransferKey, num_pages: int) -> None:
        one = self._departures.get(key)
        if one is not None:
            one.lease.renew(self._clock())
            one.num_landed = max(one.num_landed, one.num_held + num_pages)
            self._advance(one)

    def on_heartbeat(self, key: TransferKey) -> None:
        """The target is still at it."""
        one = self._departures.get(key)
        if one is not None:
            one.lease.renew(self._clock())

    def on_adopted(self, key: TransferKey) -> None:
        """The target has verified every page and runs the sequence."""
        one = self._departures.get(key)
        if one is None or one.has_outcome or not one.stopped_s:
            return
        one.adopted = True
        self.num_moved += 1
        target, request = one.target, self._worker.request_of(one.sequence)
        assert request is not None  # else it would have been abandoned
        self._worker.hand_over(request, Moved(target.worker_id, target.epoch, target.address, key.transfer_id))
        log.info(
            "%s moved to %s: %d pages, it stood still for %.1f ms",
            one.sequence.request_id,
            target.worker_id,
            one.num_pushed - one.num_held,
            (time.monotonic() - one.stopped_s) * 1e3,
        )
        one.report(None)
        self._settle(one)

    def on_failed(self, key: TransferKey, error: PenstockError) -> None:
        """The target refuses, the call broke, an answer is overdue or the wire failed."""
        one = self._departures.get(key)
        if one is not None:
            self._fail(one, error)

    def sweep(self, now_s: float) -> float | None:
        """Gives heartbeats; lets sequences run on here whose target has fallen silent. When to look again."""
        if self._sweeper.is_due(now_s, bool(self._departures)):
            assert self.calls is not None
            for one in [one for one in self._departures.values() if not one.has_outcome]:
                if one.lease.is_over(now_s):
                    self._fail(one, DeadlineExceeded(f"{one.target.worker_id} has been silent for {self._lease_s:g} s"))
                else:
                    self.calls.heartbeat(one.key)
            under_way = (one for one in self._departures.values() if not one.has_outcome)
            self._sweeper.looked(now_s, (one.lease.deadline_s for one in under_way))
        return self._sweeper.next_s

    # What the sender says.

    def on_sent(self, key: TransferKey) -> None:
        """Every push is complete, or none will follow."""
        one = self._departures.get(key)
        if one is not None:
            one.is_open = False
            self._pool.release(list(one.borrowed.values()))
            one.borrowed = {}
            self._settle(one)

    # Copying.

    def _advance_all(self) -> None:
        now_s = time.monotonic()
        for one in list(self._departures.values()):
            if not one.stopped_s:
                one.token_s = now_s
            self._advance(one)

    def _advance(self, one: Departure) -> None:
        """Pushes what is complete; stops the sequence once little is left, when no step computes it any more."""
        if one.has_outcome or one.stopped_s:
            return
        sequence = one.sequence
        if one.is_stopping:
            if one.plan is not None and self._worker.scheduler.is_at_rest(sequence):
                self._stop(one, one.plan)
        elif not self._worker.scheduler.is_running(sequence):
            self._fail(one, Unavailable(f"{sequence.request_id} was preempted; it has no pages to move now"))
        elif one.plan is not None:
            num_full = sequence.num_computed_tokens // one.page_size
            self._push(one, min(num_full, one.num_reserved))
            if should_stop(CopyProgress(num_full, one.num_held, one.num_landed, one.num_reserved)):
                one.is_stopping = True
                self._worker.scheduler.pause(sequence)
                self._advance(one)

    def _push(self, one: Departure, end: int) -> None:
        """Sends what fills the target's pages of the sequence up to `end`."""
        first, held, size = one.num_pushed, one.num_held, one.page_size
        if end <= first:
            return
        pages = one.sequence.pages
        tokens = range(first * size, min(end * size, one.sequence.num_computed_tokens))
        self._borrow(one, range(tokens.start // self._page_size, -(-tokens.stop // self._page_size)))
        if self._checksums:
            one.checksums += self._sender.sent_checksums(one.key, tokens, pages)
        self._sender.push_tokens(one.key, first - held, tokens, pages, one.destination[first - held : end - held])
        one.num_pushed = end

    def _borrow(self, one: Departure, indexes: range) -> None:
        """References on our pages that are read from now on."""
        fresh = {index: one.sequence.pages[index] for index in indexes if index not in one.borrowed}
        self._pool.share(list(fresh.values()))
        one.borrowed |= fresh

    def _stop(self, one: Departure, plan: Plan) -> None:
        """The sequence stands still: what is left of it goes out."""
        assert self.calls is not None
        sequence, size = one.sequence, one.page_size
        num_tokens = sequence.num_computed_tokens
        num_pages = -(-num_tokens // size)
        if num_pages > one.num_reserved:
            self._fail(one, Unavailable(f"{sequence.request_id} outgrew the {one.num_reserved} pages reserved"))
            return
        one.stopped_s = time.monotonic()
        self._push(one, num_pages)
        self._sender.finish(one.key)
        manifest = Manifest(
            num_tokens=num_tokens,
            num_pages=num_pages - one.num_held,
            page_hashes=tuple(self._hashes(sequence, size)[one.num_held : num_tokens // size]),
            checksums=tuple(one.checksums),
        )
        request, now_s = self._worker.request_of(sequence), time.monotonic()
        assert request is not None  # it runs
        state = sequence_state.to_wire(request, self._worker.timing(request), now_s, one.num_told)
        self.calls.finish(one.key, state, manifest, now_s - (one.token_s or now_s))

    def _hashes(self, sequence: Generation, page_size: int) -> list[PageHash]:
        if page_size == self._page_size:
            return sequence.hash_full_pages(page_size)
        return hash_pages(sequence.token_ids, page_size, sequence.salt)

    # The end.

    def _abandon(self, request: DecodeRequest) -> None:
        """The request has ended here."""
        for one in list(self._departures.values()):
            if one.sequence is request.sequence and not one.has_outcome:
                self._fail(one, Cancelled(f"{request.sequence.request_id} has ended"))

    def _fail(self, one: Departure, error: PenstockError) -> None:
        """The sequence, if it has not ended, runs on here."""
        if one.has_outcome:
            return
        one.error = error
        self.num_failed += 1
        log.info("%s did not move to %s: %s", one.sequence.request_id, one.target.worker_id, error)
        if one.is_stopping and self._worker.request_of(one.sequence) is not None:
            self._worker.scheduler.resume(one.sequence)
        one.report(error)
        if one.is_open:
            self._sender.abort(one.key)
        self._settle(one)

    def _settle(self, one: Departure) -> None:
        """Once there is an outcome and nothing is written any more, the target is told and the attempt forgotten."""
        assert self.calls is not None
        if one.has_outcome and not one.is_open:
            del self._departures[one.key]
            self.calls.close(one.key, one.error)
