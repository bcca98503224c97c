"""Owns the transfers into this worker's page pool: reservation, arrival, verification, fences. Runs on the step loop.

A transfer brings a prompt's pages from a prefill worker, or a running sequence's pages from another decode worker. A
prompt's transfer begins when a prefill worker is asked, but holds pages only once that worker begins to compute; a
sequence's transfer holds them from the start. Either is forgotten once its sender can no longer write. The table keeps
two lifetimes apart: the request's interest (it may fall back or be cancelled at any moment, and gives up a sender whose
lease expires) and the sender's right to write, which alone decides when a fence is lifted.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from decode_worker.prefill.client import PrefillCandidate, PrefillClient, RemotePrefill, TransferEvents
from decode_worker.request import DecodeRequest
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.step.sequence import Sequence
from kv_transfer.endpoints import KvReceiver
from kv_transfer.session.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.session.transfer_session import ENDED, Effect, Manifest, TransferSession
from penstock.config import TransferConfig
from penstock.errors import InvalidInput, PenstockError, TransferError, TransferRefused
from penstock.types import Epoch, PageId, SamplingParams, TransferId, TransferKey

log = logging.getLogger(__name__)

_UNUSED_SAMPLE = SamplingParams(max_tokens=1, temperature=0.0)  # the cheapest parameters


class SenderCalls(Protocol):
    """Sends commands to a transfer's sender."""

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None: ...

    def cancel(self, key: TransferKey) -> None: ...

    def heartbeat(self, key: TransferKey) -> None: ...


@dataclass(frozen=True, slots=True)
class LandedTransfer:
    """A verified hand-off: the KV of the first `num_tokens` tokens is in the sequence's pages."""

    key: TransferKey
    request: DecodeRequest
    num_tokens: int
    num_pages: int  # pages that were transferred


@dataclass(frozen=True, slots=True)
class FailedTransfer:
    """A transfer that contradicts its manifest or whose sender is silent, so that its request must be served another
    way.
    """

    key: TransferKey
    request: DecodeRequest
    error: TransferError


@dataclass(slots=True, eq=False)
class TransferAttempt:
    """A transfer. `request` becomes None once the request is served another way or has ended."""

    session: TransferSession
    request: DecodeRequest | None
    sender: SenderCalls
    num_tokens: int  # tokens whose KV the transfer brings
    on_landed: Callable[[int], None] = lambda num_pages: None  # called with the number of pages that have landed
    is_part: bool = False  # whether this worker computes the following tokens and samples
    num_unneeded: int = 0  # leading pages that nothing will read here
    num_held: int = 0  # leading pages that were cached here or that nothing will read
    has_begun: bool = False  # whether the sender has asked for its destination

    def mismatch(self, page_size: int, checks: KvReceiver | None) -> str | None:
        """Returns how the manifest contradicts the request or the arrived pages; None if everything fits.

        `checks` computes the checksums of the arrived pages; None skips the comparison.
        """
        request, manifest = self.request, self.session.manifest
        assert request is not None
        assert manifest is not None
        num_pages = -(-self.num_tokens // page_size) - self.num_held
        pages = self.session.pages[:num_pages]
        if manifest.num_tokens != self.num_tokens or not manifest.num_pages == num_pages == len(pages):
            return (
                f"{manifest.num_tokens} tokens in {manifest.num_pages} pages; expected {self.num_tokens} in {num_pages}"
            )
        num_full = self.num_tokens // page_size
        if list(manifest.page_hashes) != request.sequence.hash_full_pages(page_size)[self.num_held : num_full]:
            return "the page hashes differ from those of the prompt"
        if checks is not None and list(manifest.checksums) != checks.checksums(self.session.key, pages):
            return "the pages' checksums differ from the sender's"
        return None


class TransferTable:
    """Owns the transfers and their fences."""

    def __init__(
        self,
        engine: Engine,
        receiver: KvReceiver,
        calls: PrefillClient,
        epoch: Epoch,
        config: TransferConfig,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` runs a call on the step loop."""
        self._engine = engine
        self._page_size = engine.layout.page_size
        self._receiver = receiver
        self._calls = calls
        self._epoch = epoch
        self._config = config
        self._post = post
        self._clock = clock
        self._num_settling = 0  # transfers that are over but still fenced, as their last bytes may be in flight
        self._sweeper = Sweeper(heartbeat_s(config.timeout_s))
        self._transfers: dict[TransferKey, TransferAttempt] = {}
        self._unreserved: list[TransferAttempt] = []  # transfers whose senders wait for a destination
        self.num_mismatches = 0  # hand-offs that contradicted their manifest; they are recomputed

    @property
    def num_open(self) -> int:
        return len(self._transfers) + self._num_settling

    # Starts of transfers.

    def begin(
        self,
        request: DecodeRequest,
        candidate: PrefillCandidate,
        events: TransferEvents,
        patience_s: float | None = None,
        num_tokens: int | None = None,
    ) -> TransferKey:
        """Requests a remote prefill of the first `num_tokens`, by default all; reserves nothing yet.

        `on_slow` follows if it has not begun in time. If `num_tokens` is only a part, the token sampled after it is
        meaningless.
        """
        sequence = request.sequence
        count = len(sequence.token_ids) if num_tokens is None else num_tokens
        is_part = count < len(sequence.token_ids)
        key = TransferKey(TransferId(uuid.uuid4().hex), candidate.epoch, self._epoch)
        num_unneeded = self._engine.prefix_cache.window.num_unsent(count)
        self._transfers[key] = TransferAttempt(
            self._session(key), request, self._calls, count, is_part=is_part, num_unneeded=num_unneeded
        )
        self._calls.start(
            RemotePrefill(
                key=key,
                candidate=candidate,
                request_id=sequence.request_id,
                token_ids=tuple(sequence.token_ids[:count]),
                num_prompt_tokens=min(count, sequence.num_prompt_tokens),
                sampling=_UNUSED_SAMPLE if is_part else sequence.sampling,
                salt=sequence.salt,
                lane=sequence.lane,
                timeout_s=max(0.001, request.deadline_s - time.monotonic()),
                adapter=sequence.adapter,
                tenant=sequence.tenant,
                kv_hints=sequence.kv_hints,
                patience_s=patience_s,
            ),
            events,
        )
        return key

    def receive(
        self,
        key: TransferKey,
        request: DecodeRequest,
        num_tokens: int,
        scheduler: DecodeScheduler,
        sender: SenderCalls,
        on_landed: Callable[[int], None],
        num_unneeded: int = 0,
    ) -> bool:
        """Reserves pages for a migrating sequence, which may grow to `num_tokens` before it pauses at its source.
        Nothing will read its first `num_unneeded` pages.

        Returns False if there are too few pages now, and raises TransferError for a source that was forgotten; neither
        leaves a transfer. `sender` and `on_landed` reach the source.
        """
        transfer = TransferAttempt(
            self._session(key), request, sender, num_tokens, on_landed, num_unneeded=num_unneeded
        )
        self._transfers[key] = transfer
        is_granted = False
        try:
            is_granted = self._grant(transfer, request, scheduler)
        finally:
            if not is_granted:
                del self._transfers[key]
        return is_granted

    def num_unneeded(self, sequence: Sequence, num_dropped_tokens: int) -> int:
        """Returns how many leading pages of a migrating sequence will never be read here, given how many tokens' KV its
        source has dropped. Raises InvalidInput if later tokens read some of these, and TransferRefused if they end
        inside a page.
        """
        num_pages, rest = divmod(num_dropped_tokens, self._page_size)
        if num_pages > self._engine.prefix_cache.window.num_behind(len(sequence.token_ids) - 1):
            raise InvalidInput("num_dropped_tokens", f"is {num_dropped_tokens}, but later tokens read some of them")
        if rest:
            raise TransferRefused(
                f"the source has dropped the first {num_dropped_tokens} tokens, which end inside a page of "
                f"{self._page_size} tokens here; give both workers the same engine.page_size"
            )
        return num_pages

    def _session(self, key: TransferKey) -> TransferSession:
        return TransferSession(key, Lease(self._config.timeout_s, self._clock()))

    def set_num_tokens(self, key: TransferKey, num_tokens: int) -> None:
        """Sets the final number of tokens whose KV arrives for a migrating sequence, which has paused at its source."""
        self._transfers[key].num_tokens = num_tokens

    def owns(self, key: TransferKey) -> bool:
        return key in self._transfers

    def num_tokens(self, key: TransferKey) -> int:
        """Returns for how many tokens the transfer brings KV."""
        return self._transfers[key].num_tokens

    def is_part(self, key: TransferKey) -> bool:
        """Returns whether the transfer brings only a part of the sequence's tokens, so that its first token is not the
        sequence's.
        """
        return key in self._transfers and self._transfers[key].is_part

    def has_begun(self, key: TransferKey) -> bool:
        """Returns whether the sender has asked for its destination."""
        return key in self._transfers and self._transfers[key].has_begun

    def request_of(self, key: TransferKey) -> DecodeRequest | None:
        transfer = self._transfers.get(key)
        return transfer.request if transfer else None

    # Reservation.

    def on_reserve(self, key: TransferKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.request is not None and not transfer.has_begun:
            transfer.has_begun = True
            self._unreserved.append(transfer)

    def grant_reservations(self, scheduler: DecodeScheduler) -> list[FailedTransfer]:
        """Reserves pages for waiting senders in the scheduler's order, as long as there are any. Returns the transfers
        whose senders were forgotten in the meantime.
        """
        failed: list[FailedTransfer] = []
        waiting = [(transfer, transfer.request) for transfer in self._unreserved if transfer.request is not None]
        waiting.sort(key=lambda pair: scheduler.rank(pair[1].sequence))
        num_granted = 0
        for transfer, request in waiting:
            try:
                if not self._grant(transfer, request, scheduler):
                    break
            except TransferError as error:
                failed.append(FailedTransfer(transfer.session.key, request, error))
                self._give_up(transfer)
            num_granted += 1
        self._unreserved = [transfer for transfer, _ in waiting[num_granted:]]
        return failed

    def _grant(self, transfer: TransferAttempt, request: DecodeRequest, scheduler: DecodeScheduler) -> bool:
        """Fences pages and sends them as the destination. Returns False if there are too few now. Raises TransferError
        for an unknown sender, and then leaves the pages unfenced with the request.
        """
        # A part also needs room for the rest; otherwise it would preempt others or be preempted as soon as it runs.
        num_total = len(request.sequence.token_ids) if transfer.is_part else transfer.num_tokens
        reservation = scheduler.reserve(request.sequence, num_total, transfer.num_tokens, transfer.num_unneeded)
        if reservation is None:
            return False
        request.times.reserved_s = time.monotonic()
        sequence = request.sequence
        sequence.pages, sequence.num_dropped = [*reservation.held, *reservation.fresh], reservation.num_dropped
        sequence.num_stripped, sequence.num_attached = reservation.num_stripped, reservation.num_attached
        num_fresh = -(-transfer.num_tokens // self._page_size) - len(reservation.held)
        key, fresh = transfer.session.key, reservation.fresh[:num_fresh]
        transfer.num_held = len(reservation.held)
        self._engine.pool.fence(fresh, key)
        try:
            self._receiver.open(key, fresh, timeout_s=math.inf)  # the session's lease bounds it
        except TransferError:
            self._engine.pool.lift(key)
            raise
        transfer.session.on_reserved(fresh, self._clock())
        transfer.sender.send_destination(key, transfer.num_held, fresh)
        return True

    # Arrival.

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> LandedTransfer | FailedTransfer | None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        effects = transfer.session.on_arrival(first_index, num_pages, self._clock())
        transfer.on_landed(transfer.session.num_landed)
        return self._apply(transfer, effects)

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> LandedTransfer | FailedTransfer | None:
        transfer = self._transfers.get(key)
        return self._apply(transfer, transfer.session.on_manifest(manifest)) if transfer else None

    def _verify(self, transfer: TransferAttempt) -> LandedTransfer | FailedTransfer | None:
        """Verifies the transfer's pages and answers the session's VERIFY."""
        session, request = transfer.session, transfer.request
        assert request is not None
        try:
            problem = transfer.mismatch(self._page_size, self._receiver if self._config.checksums else None)
        except TransferError as forgotten:  # its sender was forgotten in the meantime
            problem = f"its pages cannot be verified: {forgotten}"
        transfer.request = None
        effects = [*session.on_verified(problem is None), *session.on_admitted()]
        self._apply(transfer, effects)
        if problem is None:
            assert session.manifest is not None
            return LandedTransfer(session.key, request, transfer.num_tokens, session.manifest.num_pages)
        self.num_mismatches += 1
        error = TransferError(f"transfer {session.key.transfer_id}: {problem}")
        log.error("%s: %s", request.sequence.request_id, error)
        return FailedTransfer(session.key, request, error)

    # Leases.

    def on_heartbeat(self, key: TransferKey) -> None:
        """Renews the sender's lease."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.session.on_heartbeat(self._clock())

    def sweep(self, now_s: float) -> list[FailedTransfer]:
        """Sends heartbeats and gives up transfers whose sender is silent; their fences stay."""
        expired: list[FailedTransfer] = []
        if not self._sweeper.is_due(now_s, bool(self._transfers)):
            return expired
        for transfer in list(self._transfers.values()):
            key = transfer.session.key
            effects = transfer.session.expire(now_s)
            if transfer.session.phase not in ENDED:
                transfer.sender.heartbeat(key)
            elif transfer.request is not None:
                silent = f"no page and no sign of life for {transfer.session.lease.length_s:g} s"
                error = TransferError(f"transfer {key.transfer_id}: {silent}")
                expired.append(FailedTransfer(key, transfer.request, error))
                self._give_up(transfer, effects)
        deadlines = (transfer.session.deadline_s for transfer in self._transfers.values())
        self._sweeper.looked(now_s, (deadline_s for deadline_s in deadlines if deadline_s is not None))
        return expired

    @property
    def next_sweep_s(self) -> float | None:
        return self._sweeper.next_s

    # Ends.

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> DecodeRequest | None:
        """Records that the sender has stopped writing. Returns the request if it must be served another way."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        effects = transfer.session.on_closed()
        if error is None and transfer.session.phase not in ENDED:
            # Its last pages are in flight, since completion and arrival travel separately. Its lease is no longer
            # renewed.
            self._apply(transfer, effects)
            return None
        return self._give_up(transfer, effects)

    def give_up(self, key: TransferKey) -> DecodeRequest | None:
        """Ends the request's interest after a broken call, a failed transport or missing pages, though the sender may
        still write. Returns the request if it still waits and must be served another way.
        """
        transfer = self._transfers.get(key)
        return self._give_up(transfer) if transfer else None

    def on_quiesced(self, key: TransferKey) -> None:
        """Ends the transfer, because the sender's incarnation is over or has reported that it has stopped writing."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._apply(transfer, transfer.session.on_sender_dead())

    def abandon(self, request: DecodeRequest) -> None:
        """Cancels the transfers of a request that has ended, if any are in flight."""
        for key in (request.transfer, request.hedge.key if request.hedge else None):
            transfer = self._transfers.get(key) if key else None
            if transfer is not None and transfer.request is request:
                self._give_up(transfer)

    def _lift(self, key: TransferKey) -> None:
        self._num_settling -= 1
        self._engine.pool.lift(key)

    def _give_up(self, transfer: TransferAttempt, effects: Iterable[Effect] = ()) -> DecodeRequest | None:
        request, transfer.request = transfer.request, None
        self._apply(transfer, [*effects, *transfer.session.on_abort()])
        return request

    def _apply(self, transfer: TransferAttempt, effects: Iterable[Effect]) -> LandedTransfer | FailedTransfer | None:
        key, verify = transfer.session.key, False
        for effect in effects:
            match effect:
                case Effect.VERIFY:
                    verify = True  # last: the sequence may use the pages at once, so their fence must be lifted
                case Effect.CANCEL:
                    transfer.sender.cancel(key)
                case Effect.CLOSE:
                    # Only after the sender is over, since some transports need the receiver to finish.
                    self._receiver.close(key)
                    del self._transfers[key]
                case Effect.LIFT if transfer.session.landed:
                    self._engine.pool.lift(key)
                case Effect.LIFT:
                    # The sender is over, but its last writes may still be in flight.
                    self._num_settling += 1
                    self._receiver.after_stray_writes(lambda: self._post(lambda: self._lift(key)))
        return self._verify(transfer) if verify else None
