"""Transfers into this worker's pool: reservation, arrival, verification, fences. Runs on the step loop.

A transfer begins when a prefill worker is asked, holds pages only from the moment that worker begins to compute, and
is forgotten once nothing of it can be written any more. Two lives are kept apart: the request's interest (it may fall
back or be cancelled at any moment) and the sender's right to write, which alone decides when a fence is lifted.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.prefill_client import PrefillCandidate, RemotePrefill
from decode_worker.request import DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.sequence import SampledToken
from kv_transfer.checksum import page_checksums
from kv_transfer.receiver import TransferReceiver
from penstock import wire
from penstock.errors import PenstockError, TransferError
from penstock.types import Epoch, PageHash, PageId, TransferId, TransferKey
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)


class PrefillCalls(Protocol):
    """The way to prefill workers; `decode_worker.prefill_client.PrefillClient`."""

    def start(self, prefill: RemotePrefill) -> None: ...

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None: ...

    def cancel(self, key: TransferKey) -> None: ...


@dataclass(frozen=True, slots=True)
class Landed:
    """A verified hand-off: the KV of the first `num_tokens` tokens is in the sequence's pages."""

    request: DecodeRequest
    num_tokens: int
    num_pages: int  # that crossed the wire


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A hand-off that is not what its manifest says: the request is served another way."""

    request: DecodeRequest
    error: TransferError


@dataclass(slots=True, eq=False)
class _Transfer:
    """One attempt. `request` is None once it has lost interest; `sender_over` once nothing can be written any more."""

    key: TransferKey
    request: DecodeRequest | None
    num_tokens: int  # whose KV is to be computed
    num_held: int = 0
    pages: list[PageId] = field(
        default_factory=list
    )  # to be written: fenced until all have landed or the sender is over
    arrived: set[int] = field(default_factory=set)  # indexes into `pages`
    manifest: worker_pb2.PrefillPushed | None = None
    num_pages_asked: int = 0
    sender_over: bool = False


class Transfers:
    """Owns the transfers and their fences."""

    def __init__(
        self,
        engine: Engine,
        receiver: TransferReceiver,
        epoch: Epoch,
        checksums: bool,
        on_sender_done: Callable[[TransferKey], None] = lambda key: None,
    ) -> None:
        """`on_sender_done` is told of a transfer whose sender is done while pages have not arrived yet."""
        self._engine = engine
        self._page_size = engine.layout.page_size
        self._receiver = receiver
        self._epoch = epoch
        self._checksums = checksums
        self._on_sender_done = on_sender_done
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._asking: deque[_Transfer] = deque()  # reservations not granted yet, in order
        self.calls: PrefillCalls | None = None
        self.num_mismatches = 0  # hand-offs that were not what the manifest said: recomputed, never decoded

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    def begin(self, request: DecodeRequest, candidate: PrefillCandidate) -> TransferKey:
        """Asks a prefill worker; nothing is reserved yet."""
        assert self.calls is not None
        sequence = request.sequence
        key = TransferKey(TransferId(uuid.uuid4().hex), candidate.epoch, self._epoch)
        self._transfers[key] = _Transfer(key, request, len(sequence.token_ids))
        self.calls.start(
            RemotePrefill(
                key=key,
                candidate=candidate,
                request_id=sequence.request_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                salt=sequence.salt,
                timeout_s=max(0.001, request.deadline_s - time.monotonic()),
            )
        )
        return key

    def request_of(self, key: TransferKey) -> DecodeRequest | None:
        transfer = self._transfers.get(key)
        return transfer.request if transfer else None

    @staticmethod
    def first_token(event: worker_pb2.PrefillFirstToken) -> SampledToken:
        logprob = wire.logprob_from_wire(event.logprob) if event.HasField("logprob") else None
        return SampledToken(event.token_id, logprob)

    # Reservation.

    def on_reserve(self, key: TransferKey, num_pages: int) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or transfer.request is None or transfer.num_pages_asked:
            return
        transfer.num_pages_asked = num_pages
        self._asking.append(transfer)

    def grant_reservations(self, scheduler: DecodeScheduler) -> None:
        """Gives pages to those who asked, oldest first, as long as there are any."""
        while self._asking:
            transfer = self._asking[0]
            if transfer.request is not None and not self._grant(transfer, transfer.request, scheduler):
                return
            self._asking.popleft()

    def _grant(self, transfer: _Transfer, request: DecodeRequest, scheduler: DecodeScheduler) -> bool:
        """True when the question is settled: granted, or of a prefill that asks for the wrong number of pages."""
        assert self.calls is not None
        sequence = request.sequence
        reservation = scheduler.reserve(sequence, transfer.num_tokens)
        if reservation is None:
            return False
        sequence.pages = [*reservation.held, *reservation.fresh]
        transfer.num_held = len(reservation.held)
        transfer.pages = reservation.fresh
        self._engine.pool.fence(reservation.fresh, transfer.key)
        self._receiver.open(transfer.key, reservation.fresh)
        self.calls.send_destination(transfer.key, transfer.num_held, reservation.fresh)
        return True

    # Arrival.

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> Landed | Mismatch | None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        transfer.arrived.update(range(first_index, min(first_index + num_pages, len(transfer.pages))))
        return self._landed(transfer)

    def on_manifest(self, key: TransferKey, manifest: worker_pb2.PrefillPushed) -> Landed | Mismatch | None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        transfer.manifest = manifest
        return self._landed(transfer)

    def _landed(self, transfer: _Transfer) -> Landed | Mismatch | None:
        """The hand-off, once every page is here and is what the manifest says."""
        request = transfer.request
        if request is None or transfer.manifest is None or len(transfer.arrived) < len(transfer.pages):
            return None
        problem = self._mismatch(transfer, request)
        if problem is not None:
            self.num_mismatches += 1
            error = TransferError(f"transfer {transfer.key.transfer_id}: {problem}")
            log.error("%s: %s", request.sequence.request_id, error)
            self._give_up(transfer)
            return Mismatch(request, error)
        transfer.request = None
        self._lift(transfer)  # each page is written once, and all have arrived
        self._settle(transfer)
        return Landed(request, transfer.num_tokens, len(transfer.pages))

    def _mismatch(self, transfer: _Transfer, request: DecodeRequest) -> str | None:
        """What of the manifest does not fit what was asked for or what arrived; None where all fits."""
        manifest = transfer.manifest
        assert manifest is not None
        if manifest.num_tokens != transfer.num_tokens or manifest.num_pages != len(transfer.pages):
            return (
                f"{manifest.num_tokens} tokens in {manifest.num_pages} pages; "
                f"expected {transfer.num_tokens} in {len(transfer.pages)}"
            )
        num_full = transfer.num_tokens // self._page_size
        hashes = request.sequence.hash_full_pages(self._page_size)[transfer.num_held : num_full]
        if [PageHash(page) for page in manifest.page_hashes] != hashes:
            return "the page hashes differ from those of the prompt"
        if self._checksums and list(manifest.checksums) != page_checksums(self._engine.kv_pages, transfer.pages):
            return "the pages' checksums differ from the sender's"
        return None

    # The end.

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> DecodeRequest | None:
        """The sender writes no more. Returns the request where it has to be served another way."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        transfer.sender_over = True
        if error is None and transfer.request is not None:
            self._on_sender_done(key)  # its last pages are on their way: completion and arrival travel apart
            return None
        return self._give_up(transfer)

    def on_stalled(self, key: TransferKey) -> DecodeRequest | None:
        """The wire failed, or pages never came. Returns the request to be served another way."""
        transfer = self._transfers.get(key)
        return self._give_up(transfer) if transfer else None

    def on_lost(self, key: TransferKey) -> DecodeRequest | None:
        """The call broke; the sender may still write. Returns the request to be served another way."""
        transfer = self._transfers.get(key)
        return self._give_up(transfer) if transfer else None

    def on_quiesced(self, key: TransferKey) -> None:
        """The sender's incarnation is over, or has told that it writes no more."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.sender_over = True
            self._settle(transfer)

    def abandon(self, request: DecodeRequest) -> None:
        """The request has ended: its transfer, if one is under way, is cancelled."""
        transfer = self._transfers.get(request.transfer) if request.transfer else None
        if transfer is None or transfer.request is not request:
            return
        self._give_up(transfer)

    def _give_up(self, transfer: _Transfer) -> DecodeRequest | None:
        assert self.calls is not None
        request, transfer.request = transfer.request, None
        if request is not None and not transfer.sender_over:
            self.calls.cancel(transfer.key)
        self._settle(transfer)
        return request

    def _settle(self, transfer: _Transfer) -> None:
        """Forgets the transfer once the sender is over and nobody waits for its pages.

        Until then the receiver keeps serving it: a sender on a wire that needs our help could not end otherwise.
        """
        if transfer.request is None and transfer.sender_over:
            self._receiver.close(transfer.key)
            self._lift(transfer)
            del self._transfers[transfer.key]

    def _lift(self, transfer: _Transfer) -> None:
        if self._engine.pool.is_fencing(transfer.key):
            self._engine.pool.lift(transfer.key)
