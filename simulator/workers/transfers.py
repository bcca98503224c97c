"""Models transfers into a decode worker's pool in virtual time, with the real transfer session and the real fences.

Follows `decode_worker.prefill.transfer_table` and `worker.fence_monitor`: pages are fenced from their reservation until
the sender can no longer write them, which elapsed time never proves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast

from decode_worker.schedule.scheduler import DecodeScheduler
from engine.cache.page_pool import PagePool
from engine.step.sequence import Sequence
from kv_transfer.session.lease import Lease, heartbeat_s
from kv_transfer.session.transfer_session import ENDED, Effect, Manifest, TransferSession
from penstock.errors import PenstockError, TransferError, Unavailable
from penstock.types import Epoch, TransferId, TransferKey, WorkerId
from router.routing.policy.interface import PlannedPull
from simulator.request import RequestTokens
from simulator.workers.prefill_model import ComputedPrompt, PrefillModel
from simulator.world.network import Call, Network, Node, State

_LEASE_S = 30.0
_FIRST_PAUSE_S = 0.2  # time between two checks whether a lost sender may still write
_LONGEST_PAUSE_S = 5.0
_REFUSALS = 2  # consecutive refusals prove that the process behind an address is gone


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """A prefill worker that the router proposes, with estimates in seconds."""

    worker_id: WorkerId
    epoch: Epoch
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0  # tokens of the prompt in its cache
    pull: PlannedPull | None = None


class Sender(Protocol):
    """A worker that may write pages: a prefill worker, or a decode worker that a sequence migrates from."""

    node: Node

    def is_open(self, key: TransferKey) -> bool: ...

    def cancel_transfer(self, key: TransferKey) -> None: ...


class TransferOwner:
    """The decode model as its transfers see it. Calls come on its step loop."""

    def post(self, call: Callable[[], None]) -> None:
        raise NotImplementedError

    def on_first_token(self, sequence: Sequence, first: ComputedPrompt) -> None:
        raise NotImplementedError

    def on_landed(self, sequence: Sequence, num_tokens: int) -> None:
        raise NotImplementedError

    def on_failed(self, sequence: Sequence, error: PenstockError | None) -> None:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer. `sequence` is None once nothing waits for the pages."""

    session: TransferSession
    worker_id: WorkerId
    sequence: Sequence | None
    num_tokens: int
    is_part: bool  # whether the owner computes the tokens that follow
    call: Call | None = None
    requested: bool = False  # the sender has asked for pages
    answered: bool = False  # its first token has arrived


class TransferModel:
    """Owns the transfers into one pool and is their receiving end."""

    def __init__(
        self,
        node: Node,
        network: Network,
        pool: PagePool,
        scheduler: DecodeScheduler,
        page_size: int,
        find_sender: Callable[[str], Sender | None],
        owner: TransferOwner,
    ) -> None:
        self.node = node
        self.num_bad_writes = 0  # writes to pages that were not fenced for the writer; must stay 0
        self._network = network
        self._pool = pool
        self._scheduler = scheduler
        self._page_size = page_size
        self._find_sender = find_sender
        self._owner = owner
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._requesting: deque[_Transfer] = deque()
        self._number = 0

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    def begin(self, sequence: Sequence, candidate: PrefillOption, num_tokens: int) -> None:
        """Calls a prefill worker for the first `num_tokens`; nothing is reserved yet."""
        self._number += 1
        transfer_id = TransferId(f"{self.node.name}-{self._number}")
        key = TransferKey(transfer_id, candidate.epoch, self.node.epoch)
        session = TransferSession(key, Lease(_LEASE_S, self._network.sim.now_s))
        transfer = _Transfer(session, candidate.worker_id, sequence, num_tokens, num_tokens < len(sequence.token_ids))
        self._transfers[key] = transfer
        callee = self._network.node(candidate.worker_id)
        if callee is not None and callee.epoch != candidate.epoch:
            callee = None  # its successor refuses calls meant for it
        model = self._find_prefill(candidate.worker_id)

        def lost() -> None:
            self._owner.post(lambda: self._on_lost(key))

        def lost_there() -> None:
            assert model is not None
            model.cancel(key)

        transfer.call = self._network.call(self.node, callee, lost, lost_there)
        if transfer.call is not None:
            assert model is not None
            call, copy = transfer.call, _copy(sequence, num_tokens, self._page_size)
            call.send(self.node, lambda: model.submit(key, copy, self, call, candidate.pull))
        self._expire_later(key)

    def _find_prefill(self, worker_id: WorkerId) -> PrefillModel | None:
        sender = self._find_sender(worker_id)
        return sender if isinstance(sender, PrefillModel) else None

    # Sequences that migrate here.

    def receive(
        self, key: TransferKey, sequence: Sequence, num_tokens: int, sender_id: WorkerId, call: Call
    ) -> tuple[int, int] | None:
        """Reserves pages for a migrating sequence, which may grow to `num_tokens` before it pauses at its source.

        Returns how many leading pages are cached here and how many there are in all; None if there are too few now.
        """
        reservation = self._scheduler.reserve(sequence, num_tokens, len(sequence.token_ids) - 1)
        if reservation is None:
            return None
        now_s = self._network.sim.now_s
        transfer = _Transfer(TransferSession(key, Lease(_LEASE_S, now_s)), sender_id, sequence, num_tokens, True, call)
        self._transfers[key] = transfer
        sequence.pages = [*reservation.held, *reservation.fresh]
        self._pool.fence(reservation.fresh, key)
        transfer.session.on_reserved(reservation.fresh, now_s)
        self._expire_later(key)
        return len(reservation.held), len(sequence.pages)

    def finish(self, key: TransferKey, manifest: Manifest) -> None:
        """Takes the end of a sequence that has paused at its source."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.num_tokens = manifest.num_tokens
            self._take_manifest(key, manifest)

    def lose(self, key: TransferKey) -> None:
        """Stops waiting for a source whose call broke; it may still write."""
        self._on_lost(key)

    # The end of a request.

    def abandon(self, sequence: Sequence) -> None:
        """Cancels the transfer of a request that has ended."""
        for transfer in list(self._transfers.values()):
            if transfer.sequence is sequence:
                self._give_up(transfer)

    # Reservation.

    def on_reserve(self, key: TransferKey) -> None:
        self._owner.post(lambda: self._request(key))

    def _request(self, key: TransferKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.sequence is not None and not transfer.requested:
            transfer.requested = True
            self._requesting.append(transfer)

    def grant_reservations(self) -> None:
        """Reserves pages for waiting transfers, oldest first, while pages last."""
        while self._requesting:
            transfer = self._requesting[0]
            if transfer.sequence is not None and not self._grant(transfer, transfer.sequence):
                return
            self._requesting.popleft()

    @property
    def awaits_pages(self) -> bool:
        """Returns whether a transfer waits for its reservation."""
        return bool(self._requesting)

    def _grant(self, transfer: _Transfer, sequence: Sequence) -> bool:
        num_total = len(sequence.token_ids) if transfer.is_part else transfer.num_tokens
        reservation = self._scheduler.reserve(sequence, num_total, transfer.num_tokens)
        if reservation is None:
            return False
        key, num_held = transfer.session.key, len(reservation.held)
        sequence.pages = [*reservation.held, *reservation.fresh]
        fresh = reservation.fresh[: -(-transfer.num_tokens // self._page_size) - num_held]
        self._pool.fence(fresh, key)
        transfer.session.on_reserved(fresh, self._network.sim.now_s)
        model = self._find_prefill(transfer.worker_id)
        if transfer.call is not None and model is not None:
            transfer.call.send(self.node, lambda: model.set_destination(key, num_held))
        return True

    # Arrival.

    def on_first_token(self, key: TransferKey, first: ComputedPrompt) -> None:
        self._owner.post(lambda: self._take_first(key, first))

    def _take_first(self, key: TransferKey, first: ComputedPrompt) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.sequence is not None and not transfer.answered:
            transfer.answered = True
            self._owner.on_first_token(transfer.sequence, first)

    def on_written(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        if self.node.state is State.DEAD or key.receiver_epoch != self.node.epoch:
            return
        self.num_bad_writes += not self._pool.is_fencing(key)
        self.node.post(lambda: self._owner.post(lambda: self._arrive(key, first_index, num_pages)))

    def _arrive(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._apply(transfer, transfer.session.on_arrival(first_index, num_pages, self._network.sim.now_s))

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> None:
        self._owner.post(lambda: self._take_manifest(key, manifest))

    def _take_manifest(self, key: TransferKey, manifest: Manifest) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._apply(transfer, transfer.session.on_manifest(manifest))

    def _verify(self, transfer: _Transfer) -> None:
        """Checks the pages against the manifest; pages that do not match are never used."""
        session, sequence = transfer.session, transfer.sequence
        assert sequence is not None
        assert session.manifest is not None
        num_full = transfer.num_tokens // self._page_size
        first = -(-transfer.num_tokens // self._page_size) - session.manifest.num_pages
        wanted = tuple(sequence.hash_full_pages(self._page_size)[first:num_full])
        matches = session.manifest.num_tokens == transfer.num_tokens and session.manifest.page_hashes == wanted
        transfer.sequence = None
        self._apply(transfer, [*session.on_verified(matches), *session.on_admitted()])
        if matches:
            self._owner.on_landed(sequence, transfer.num_tokens)
        else:
            self._owner.on_failed(sequence, TransferError("the manifest does not match the request"))

    # The end.

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None:
        self._owner.post(lambda: self._close(key, error))

    def _close(self, key: TransferKey, error: PenstockError | None) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        effects = transfer.session.on_closed()
        if error is None and transfer.session.phase not in ENDED:
            self._apply(transfer, effects)
            return
        self._fail(transfer, error, effects)

    def _on_lost(self, key: TransferKey) -> None:
        """Fails the transfer after its call broke; the sender may still write."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._fail(transfer, Unavailable(f"lost {transfer.worker_id}"))
            self._check_sender(key, transfer.worker_id, _FIRST_PAUSE_S, 0)

    def _expire(self, key: TransferKey) -> None:
        """Fails a transfer without progress."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.sequence is None:
            return
        effects = transfer.session.expire(self._network.sim.now_s)
        if transfer.session.phase in ENDED:
            self._fail(transfer, TransferError(f"no page and no heartbeat for {_LEASE_S:g} s"), effects)
        else:
            self._expire_later(key)

    def _expire_later(self, key: TransferKey) -> None:
        self.node.after(heartbeat_s(_LEASE_S), lambda: self._owner.post(lambda: self._expire(key)))

    def on_heartbeat(self, key: TransferKey) -> None:
        self._owner.post(lambda: self._renew(key))

    def _renew(self, key: TransferKey) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.session.on_heartbeat(self._network.sim.now_s)

    def _fail(self, transfer: _Transfer, error: PenstockError | None, effects: Iterable[Effect] = ()) -> None:
        sequence = transfer.sequence
        self._give_up(transfer, effects)
        if sequence is not None:
            self._owner.on_failed(sequence, error)

    def _give_up(self, transfer: _Transfer, effects: Iterable[Effect] = ()) -> None:
        transfer.sequence = None
        self._apply(transfer, [*effects, *transfer.session.on_abort()])

    def _check_sender(self, key: TransferKey, worker_id: WorkerId, pause_s: float, refusals: int) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        node, model = self._network.node(worker_id), self._find_sender(worker_id)
        is_gone = node is None or node.state is State.DEAD
        refusals = refusals + 1 if is_gone else 0
        answers = model is not None and model.node.state is State.ALIVE
        answers = answers and not self._network.is_cut(self.node.name, worker_id)
        is_over = answers and (model.node.epoch != key.sender_epoch or not model.is_open(key))  # type: ignore[union-attr]
        if is_over or refusals >= _REFUSALS:
            self._apply(transfer, transfer.session.on_sender_dead())
            return
        later_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self.node.after(
            pause_s,
            lambda: self._owner.post(lambda: self._check_sender(key, worker_id, later_s, refusals)),
        )

    def _apply(self, transfer: _Transfer, effects: Iterable[Effect]) -> None:
        key, verify = transfer.session.key, False
        for effect in effects:
            match effect:
                case Effect.VERIFY:
                    verify = True  # last, because its result may use the pages, whose fence must be lifted first
                case Effect.CANCEL:
                    sender = self._find_sender(transfer.worker_id)
                    if transfer.call is not None and sender is not None:
                        transfer.call.send(self.node, lambda sender=sender: sender.cancel_transfer(key))  # type: ignore[misc]
                case Effect.CLOSE:
                    if transfer.call is not None:
                        transfer.call.close()
                    del self._transfers[key]
                case Effect.LIFT:
                    self._pool.lift(key)
        if verify:
            self._verify(transfer)


def _copy(sequence: Sequence, num_tokens: int, page_size: int) -> Sequence:
    """Returns the sequence that is sent to the prefill worker, with the page hashes as if it had computed them."""
    return Sequence(
        request_id=sequence.request_id,
        token_ids=cast(RequestTokens, sequence.token_ids).first(num_tokens).as_list(),
        num_prompt_tokens=min(num_tokens, sequence.num_prompt_tokens),
        sampling=sequence.sampling,
        salt=sequence.salt,
        page_hashes=sequence.page_hashes[: num_tokens // page_size],
    )
