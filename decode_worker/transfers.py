"""Transfers into this worker's pool: reservation, arrival, verification, fences. Runs on the step loop.

A transfer brings a prompt's pages from a prefill worker, or those of a running sequence from another decode worker. The
first begins when a prefill worker is asked and holds pages only from the moment that worker begins to compute; the
second holds them from its beginning. Either is forgotten once nothing of it can be written any more. Two lives are
kept apart: the request's interest (it may fall back or be cancelled at any moment, and a sender that is silent for its
lease loses it) and the sender's right to write, which alone decides when a fence is lifted.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable

from decode_worker.prefill_client import PrefillCandidate, RemotePrefill
from decode_worker.request import DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from decode_worker.transfer import Landed, Lapsed, Mismatch, PrefillCalls, SenderCalls, Transfer
from engine.engine import Engine
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.lease import Lease, Sweeper, heartbeat_s
from kv_transfer.session import ENDED, Effect, Manifest, TransferSession
from penstock.config import TransferConfig
from penstock.errors import PenstockError, TransferError
from penstock.types import Epoch, TransferId, TransferKey

log = logging.getLogger(__name__)


class Transfers:
    """Owns the transfers and their fences."""

    def __init__(
        self,
        engine: Engine,
        receiver: GroupReceiver,
        epoch: Epoch,
        config: TransferConfig,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` runs a call on the step loop."""
        self._engine = engine
        self._page_size = engine.layout.page_size
        self._receiver = receiver
        self._epoch = epoch
        self._config = config
        self._post = post
        self._clock = clock
        self._num_quieting = 0  # fences of transfers that are over, while their last bytes may be under way
        self._sweeper = Sweeper(heartbeat_s(config.timeout_s))
        self._transfers: dict[TransferKey, Transfer] = {}
        self._asking: list[Transfer] = []  # reservations not granted yet
        self.calls: PrefillCalls | None = None
        self.num_mismatches = 0  # hand-offs that were not what the manifest said: recomputed, never decoded

    @property
    def num_open(self) -> int:
        return len(self._transfers) + self._num_quieting

    def begin(
        self, request: DecodeRequest, candidate: PrefillCandidate, patience_s: float | None = None
    ) -> TransferKey:
        """Asks a prefill worker; nothing is reserved yet. `on_slow` follows unless it begins within its patience."""
        assert self.calls is not None
        sequence = request.sequence
        key = TransferKey(TransferId(uuid.uuid4().hex), candidate.epoch, self._epoch)
        session = self._session(key)
        self._transfers[key] = Transfer(session, request, self.calls, len(sequence.token_ids))
        self.calls.start(
            RemotePrefill(
                key=key,
                candidate=candidate,
                request_id=sequence.request_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                salt=sequence.salt,
                lane=sequence.lane,
                timeout_s=max(0.001, request.deadline_s - time.monotonic()),
                patience_s=patience_s,
            )
        )
        return key

    def adopt(
        self,
        key: TransferKey,
        request: DecodeRequest,
        num_tokens: int,
        scheduler: DecodeScheduler,
        sender: SenderCalls,
        on_landed: Callable[[int], None],
    ) -> bool:
        """Reserves pages for a sequence that runs elsewhere and may grow to `num_tokens` until it comes here; False,
        and no transfer, where there are too few now."""
        transfer = Transfer(self._session(key), request, sender, num_tokens, on_landed)
        self._transfers[key] = transfer
        granted = self._grant(transfer, request, scheduler)
        if not granted:
            del self._transfers[key]
        return granted

    def _session(self, key: TransferKey) -> TransferSession:
        return TransferSession(key, Lease(self._config.timeout_s, self._clock()))

    def set_num_tokens(self, key: TransferKey, num_tokens: int) -> None:
        """The sequence stands still at its source: so many of its tokens have their KV there."""
        self._transfers[key].num_tokens = num_tokens

    def is_known(self, key: TransferKey) -> bool:
        return key in self._transfers

    def num_tokens(self, key: TransferKey) -> int:
        """Whose KV it is to bring."""
        return self._transfers[key].num_tokens

    def has_begun(self, key: TransferKey) -> bool:
        """Whether its sender has asked where to write."""
        return key in self._transfers and self._transfers[key].asked

    def request_of(self, key: TransferKey) -> DecodeRequest | None:
        transfer = self._transfers.get(key)
        return transfer.request if transfer else None

    # Reservation.

    def on_reserve(self, key: TransferKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.request is not None and not transfer.asked:
            transfer.asked = True
            self._asking.append(transfer)

    def grant_reservations(self, scheduler: DecodeScheduler) -> None:
        """Gives pages to those who asked, in the scheduler's order, as long as there are any."""
        asking = [(one, one.request) for one in self._asking if one.request is not None]
        asking.sort(key=lambda pair: scheduler.rank(pair[1].sequence))
        granted = 0
        while granted < len(asking) and self._grant(*asking[granted], scheduler):
            granted += 1
        self._asking = [transfer for transfer, _ in asking[granted:]]

    def _grant(self, transfer: Transfer, request: DecodeRequest, scheduler: DecodeScheduler) -> bool:
        """Fences the pages and tells the sender; False where there are too few now."""
        reservation = scheduler.reserve(request.sequence, transfer.num_tokens)
        if reservation is None:
            return False
        key, fresh = transfer.session.key, reservation.fresh
        request.sequence.pages = [*reservation.held, *fresh]
        transfer.num_held = len(reservation.held)
        self._engine.pool.fence(fresh, key)
        self._receiver.open(key, fresh, timeout_s=math.inf)  # the session's lease bounds it
        transfer.session.on_reserved(fresh, self._clock())
        transfer.sender.send_destination(key, transfer.num_held, fresh)
        return True

    # Arrival.

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> Landed | Mismatch | None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        effects = transfer.session.on_arrival(first_index, num_pages, self._clock())
        transfer.on_landed(transfer.session.num_landed)
        return self._apply(transfer, effects)

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> Landed | Mismatch | None:
        transfer = self._transfers.get(key)
        return self._apply(transfer, transfer.session.on_manifest(manifest)) if transfer else None

    def _verify(self, transfer: Transfer) -> Landed | Mismatch | None:
        """The answer to the session's VERIFY: the hand-off, or what is wrong with it."""
        session, request = transfer.session, transfer.request
        assert request is not None
        problem = transfer.mismatch(self._page_size, self._receiver if self._config.checksums else None)
        transfer.request = None
        effects = [*session.on_verified(problem is None), *session.on_admitted()]
        self._apply(transfer, effects)
        if problem is None:
            assert session.manifest is not None
            return Landed(session.key, request, transfer.num_tokens, session.manifest.num_pages)
        self.num_mismatches += 1
        error = TransferError(f"transfer {session.key.transfer_id}: {problem}")
        log.error("%s: %s", request.sequence.request_id, error)
        return Mismatch(session.key, request, error)

    # Leases.

    def on_heartbeat(self, key: TransferKey) -> None:
        """The sender is still at it."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.session.on_heartbeat(self._clock())

    def sweep(self, now_s: float) -> list[Lapsed]:
        """Gives heartbeats to senders; ends the wait for those that have fallen silent. Their fences stay."""
        lapsed: list[Lapsed] = []
        if not self._sweeper.is_due(now_s, bool(self._transfers)):
            return lapsed
        for transfer in list(self._transfers.values()):
            key = transfer.session.key
            effects = transfer.session.expire(now_s)
            if transfer.session.phase not in ENDED:
                transfer.sender.heartbeat(key)
            elif transfer.request is not None:
                silent = f"no page and no sign of life for {transfer.session.lease.length_s:g} s"
                lapsed.append(Lapsed(key, transfer.request, TransferError(f"transfer {key.transfer_id}: {silent}")))
                self._give_up(transfer, effects)
        deadlines = (transfer.session.deadline_s for transfer in self._transfers.values())
        self._sweeper.looked(now_s, (one_s for one_s in deadlines if one_s is not None))
        return lapsed

    @property
    def next_sweep_s(self) -> float | None:
        return self._sweeper.next_s

    # The end.

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> DecodeRequest | None:
        """The sender writes no more. Returns the request where it has to be served another way."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return None
        effects = transfer.session.on_closed()
        if error is None and transfer.session.phase not in ENDED:
            # Its last pages are on their way: completion and arrival travel apart. Its lease is not renewed any more.
            self._apply(transfer, effects)
            return None
        return self._give_up(transfer, effects)

    def give_up(self, key: TransferKey) -> DecodeRequest | None:
        """The call broke, the wire failed or pages never came; the sender may still write.

        Returns the request, where it still waits, to be served another way.
        """
        transfer = self._transfers.get(key)
        return self._give_up(transfer) if transfer else None

    def on_quiesced(self, key: TransferKey) -> None:
        """The sender's incarnation is over, or has told that it writes no more."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._apply(transfer, transfer.session.on_sender_dead())

    def abandon(self, request: DecodeRequest) -> None:
        """The request has ended: its transfers, if any are under way, are cancelled."""
        for key in (request.transfer, request.hedge.key if request.hedge else None):
            transfer = self._transfers.get(key) if key else None
            if transfer is not None and transfer.request is request:
                self._give_up(transfer)

    def _lift(self, key: TransferKey) -> None:
        self._num_quieting -= 1
        self._engine.pool.lift(key)

    def _give_up(self, transfer: Transfer, effects: Iterable[Effect] = ()) -> DecodeRequest | None:
        request, transfer.request = transfer.request, None
        self._apply(transfer, [*effects, *transfer.session.on_abort()])
        return request

    def _apply(self, transfer: Transfer, effects: Iterable[Effect]) -> Landed | Mismatch | None:
        key, verify = transfer.session.key, False
        for effect in effects:
            match effect:
                case Effect.VERIFY:
                    verify = True  # last: what it brings may use the pages, whose fence must be lifted by then
                case Effect.CANCEL:
                    transfer.sender.cancel(key)
                case Effect.CLOSE:
                    # Not before the sender is over: on a wire that needs our help it could not end otherwise.
                    self._receiver.close(key)
                    del self._transfers[key]
                case Effect.LIFT if transfer.session.landed:
                    self._engine.pool.lift(key)
                case Effect.LIFT:
                    # The sender is over, but what it had sent by then may not have been written yet.
                    self._num_quieting += 1
                    self._receiver.when_quiet(lambda: self._post(lambda: self._lift(key)))
        return self._verify(transfer) if verify else None
