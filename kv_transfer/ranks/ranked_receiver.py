"""Receives a worker's transfers, with any number of ranks at either end. Implements `endpoints.KvReceiver`.

A transfer between two workers of one rank each goes straight to the local `TransferReceiver`. Any other transfer is
opened on every rank as its routes (head_routes.py); a page has arrived once every route has brought its part. Pages
with two parts have a receiver and a route for each part, and only the last pages of a transfer have both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.engine import Engine
from kv_transfer.layout.checksum import join_checksums, join_parts
from kv_transfer.ranks.head_routes import (
    MAX_RANKS,
    HeadRoute,
    check_ranks,
    join_offers,
    plan_head_routes,
    plan_part_routes,
    rank_epoch,
    rank_name,
)
from kv_transfer.ranks.remote_ends import RemoteEnds, RemoteReceiver, key_from_plain
from kv_transfer.receive.known_peers import Incarnations
from kv_transfer.receive.receiver import OnArrival, OnFailure, TransferReceiver
from kv_transfer.transports.transport import Peer
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey, WorkerId


@dataclass(slots=True)
class _RankedTransfer:
    routes: tuple[HeadRoute, ...]
    full_epoch: Epoch  # of the sender of the part that every page has
    first_windowed: int | None = None  # of its pages, the first one with a windowed part; None: pages are whole
    landed: dict[int, set[TransferKey]] = field(default_factory=dict)  # incomplete page: routes so far
    failed: bool = False

    def complete(self, first_index: int, num_pages: int, route_key: TransferKey) -> list[int]:
        """Records the pages that a route has brought. Returns the indexes of pages that are now complete."""
        offset, first_windowed = 0, self.first_windowed
        if first_windowed is not None and route_key.sender_epoch != self.full_epoch:
            offset = first_windowed  # the other part's route counts from its first page
        indexes = range(offset + first_index, offset + first_index + num_pages)
        for index in indexes:
            self.landed.setdefault(index, set()).add(route_key)
        return [index for index in indexes if len(self.landed[index]) == self._num_routes(index)]

    def _num_routes(self, index: int) -> int:
        """Returns how many routes bring a part of the page."""
        return 1 if self.first_windowed is not None and index < self.first_windowed else len(self.routes)


class RankedReceiver:
    """Receives on all ranks. Thread-safe. Callbacks run on threads of receivers and ranks, and must not block."""

    def __init__(
        self, engine: Engine, epoch: Epoch, config: TransferConfig, on_arrival: OnArrival, on_failure: OnFailure
    ) -> None:
        """Blocks while every rank creates its receiver. Raises ConfigError if the configured transport cannot be
        used."""
        self._num_ranks = engine.num_ranks
        self._parts = engine.pool.parts
        self._num_kv_heads = engine.model_layout.num_kv_heads
        self._on_arrival = on_arrival
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._peers = Incarnations()
        self._peer_ranks: dict[Epoch, int] = {}  # number of ranks of known incarnations
        self._ranked: dict[TransferKey, _RankedTransfer] = {}  # open transfers with several ranks at either end
        self._transfer_of: dict[TransferKey, TransferKey] = {}  # by route key
        self._settle_numbers = count(1)
        self._settling: dict[int, tuple[int, Callable[[], None]]] = {}  # number: ranks not settled, callback
        self._local = TransferReceiver(
            engine.kv_pages,
            engine.layout,
            rank_epoch(epoch, 0),
            config,
            self._on_route_arrival,
            self._on_route_failure,
        )
        self._receivers: list[TransferReceiver | RemoteReceiver] = [self._local]  # by rank
        self._windowed: TransferReceiver | None = None
        if engine.window_kv is not None:
            layout, callbacks = engine.model_layout.windowed_part, (self._on_route_arrival, self._on_route_failure)
            self._windowed = TransferReceiver(engine.window_kv, layout, rank_epoch(epoch, 1), config, *callbacks)
            self._receivers.append(self._windowed)
        self._remote: RemoteEnds | None = None
        if engine.ranks is not None:
            on_event = {
                "arrived": lambda body: self._on_route_arrival(key_from_plain(body[0]), body[1], body[2]),
                "failed": lambda body: self._on_route_failure(key_from_plain(body[0]), TransferError(body[1])),
                "settled": self._on_settled,
            }
            self._remote = RemoteEnds(engine.ranks, "receiver", epoch, config, on_event)
            self._receivers += [RemoteReceiver(self._remote, rank) for rank in range(1, self._num_ranks)]

    @property
    def transports(self) -> list[str]:
        return self._local.transports

    def offer(self, peer_worker_id: WorkerId, peer_epoch: Epoch, num_ranks: int = 1) -> bytes:
        """Returns what an incarnation with `num_ranks` ranks needs to push here; see `TransferReceiver.offer`."""
        check_ranks(self._num_kv_heads, num_ranks, "sender")
        with self._lock:
            if self._peer_ranks.setdefault(peer_epoch, num_ranks) != num_ranks:
                known = self._peer_ranks[peer_epoch]
                raise TransferError(
                    f"{peer_worker_id}: epoch {peer_epoch} has {known} ranks; it cannot have {num_ranks}"
                )
            surplus = self._peers.admit(Peer(peer_worker_id, peer_epoch))
        if surplus is not None:
            self.forget(surplus.epoch)
        offers = [
            self._receivers[route.receiver].offer(
                rank_name(peer_worker_id, route.sender), rank_epoch(peer_epoch, route.sender), route.heads
            )
            for route in self._plan(num_ranks)
        ]
        if self._parts is not None:
            return join_offers(len(offers), len(offers), offers)
        return join_offers(num_ranks, self._num_ranks, offers)

    def _plan(self, num_ranks: int) -> tuple[HeadRoute, ...]:
        """Returns the routes from a worker of `num_ranks` ranks."""
        if self._parts is not None:
            return plan_part_routes(self._num_kv_heads)
        return plan_head_routes(self._num_kv_heads, num_ranks, self._num_ranks)

    def window_slots(self, pages: Sequence[PageId]) -> list[int]:
        """Returns where the windowed parts of the last of these pages go, if pages have two parts; see
        `RankedSender.place`.
        """
        return [] if self._parts is None else self._parts.slots_of(pages)

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float | None = None) -> None:
        """Opens a transfer like `TransferReceiver.open` on every rank. Raises TransferError for a sender that is
        unknown or was forgotten.
        """
        with self._lock:
            num_ranks = self._ranks_of(key)
            is_ranked = num_ranks > 1 or not self._is_single
            slots = self.window_slots(pages)
            if is_ranked:
                if key in self._ranked:
                    raise TransferError(f"transfer {key.transfer_id}: already open")
                routes = self._plan(num_ranks)
                first_windowed = None if self._parts is None else len(pages) - len(slots)
                self._ranked[key] = _RankedTransfer(routes, key.sender_epoch, first_windowed)
                self._transfer_of.update({route.key_of(key): key for route in routes})
        try:
            for receiver, route_key in self._routes(key):
                own = [PageId(slot) for slot in slots] if receiver is self._windowed else pages
                receiver.open(route_key, own, timeout_s)
        except TransferError:
            if is_ranked:
                self.close(key)
            raise

    def close(self, key: TransferKey) -> None:
        """Closes a transfer like `TransferReceiver.close` on every rank."""
        routes = self._routes(key)
        with self._lock:
            self._ranked.pop(key, None)
            for _, route_key in routes:
                self._transfer_of.pop(route_key, None)
        for receiver, route_key in routes:
            receiver.close(route_key)

    def after_stray_writes(self, then: Callable[[], None]) -> None:
        """Calls `then` once `TransferReceiver.after_stray_writes` has called back on every rank."""
        number = next(self._settle_numbers)
        with self._lock:
            self._settling[number] = (len(self._receivers), then)
        for receiver in self._receivers:
            if isinstance(receiver, RemoteReceiver):
                receiver.begin_settling(number)
            else:
                receiver.after_stray_writes(lambda: self._on_settled(number))

    def _on_settled(self, number: int) -> None:
        with self._lock:
            num_left, then = self._settling.pop(number)
            if num_left > 1:
                self._settling[number] = (num_left - 1, then)
                return
        then()

    def checksums(self, key: TransferKey, pages: Sequence[PageId]) -> list[int]:
        """Returns the checksums of what the transfer has brought into these pages, for comparison with the sender's
        `sent_checksums` or `checksums`. Blocks.
        """
        with self._lock:
            transfer = self._ranked.get(key)
            num_ranks = 1 if transfer else self._ranks_of(key)
        if self._windowed is not None:
            slots, heads = [PageId(slot) for slot in self.window_slots(pages)], range(self._num_kv_heads)
            return join_parts(self._local.checksums(pages, heads), self._windowed.checksums(slots, heads))
        routes = transfer.routes if transfer else self._plan(num_ranks)
        return join_checksums([self._receivers[route.receiver].checksums(pages, route.heads) for route in routes])

    def forget(self, epoch: Epoch) -> None:
        """Forgets an incarnation like `TransferReceiver.forget` on every rank. Its open transfers fail."""
        ends = self._ends_of(epoch)
        with self._lock:
            self._peers.forget(epoch)
            self._peer_ranks.pop(epoch, None)
        for receiver, rank in ends:
            receiver.forget(rank)

    def cut_off(self, epoch: Epoch) -> bool:
        """Cuts an incarnation off like `TransferReceiver.cut_off` on every rank. Returns whether it surely
        writes no more into any rank's pool.
        """
        answers = [receiver.cut_off(rank) for receiver, rank in self._ends_of(epoch)]
        return all(answers)

    def tear_down(self, epoch: Epoch) -> bool:
        """Tears an incarnation down like `TransferReceiver.tear_down` on every rank."""
        ends = self._ends_of(epoch)
        self.forget(epoch)
        answers = [receiver.tear_down(rank) for receiver, rank in ends]
        return all(answers)

    def _ends_of(self, epoch: Epoch) -> list[tuple[TransferReceiver | RemoteReceiver, Epoch]]:
        """Returns every receiver with the epoch of every rank of the peer, or of every possible rank if it was
        forgotten.
        """
        with self._lock:
            num_ranks = self._peer_ranks.get(epoch, MAX_RANKS)
        if self._parts is not None:
            num_ranks = len(self._receivers)
        return [(receiver, rank_epoch(epoch, rank)) for receiver in self._receivers for rank in range(num_ranks)]

    def _ranks_of(self, key: TransferKey) -> int:
        """Returns the sender's number of ranks. Called under the lock. Raises TransferError."""
        num_ranks = self._peer_ranks.get(key.sender_epoch)
        if num_ranks is None:
            problem = "its sender is not known here, or was forgotten"
            raise TransferError(f"transfer {key.transfer_id}: {problem} (epoch {key.sender_epoch})")
        return num_ranks

    def shutdown(self) -> None:
        """Shuts down the receivers of all ranks; see `TransferReceiver.shutdown`."""
        self._local.shutdown()
        if self._windowed is not None:
            self._windowed.shutdown()
        if self._remote is not None:
            self._remote.close()

    def _routes(self, key: TransferKey) -> list[tuple[TransferReceiver | RemoteReceiver, TransferKey]]:
        """Returns the receivers of a transfer, each with its own key of the transfer."""
        with self._lock:
            transfer = self._ranked.get(key)
        if transfer is not None:
            return [(self._receivers[route.receiver], route.key_of(key)) for route in transfer.routes]
        return [(self._local, key)] if self._is_single else []

    @property
    def _is_single(self) -> bool:
        """Returns whether one receiver takes all of a page."""
        return len(self._receivers) == 1

    def _on_route_arrival(self, route_key: TransferKey, first_index: int, num_pages: int) -> None:
        with self._lock:
            key = self._transfer_of.get(route_key)
            transfer = self._ranked.get(key) if key is not None else None
            indexes = transfer.complete(first_index, num_pages, route_key) if transfer is not None else []
        if key is None and self._is_single:  # a transfer between single ranks; any other without a key is closed
            self._on_arrival(route_key, first_index, num_pages)
        if key is None:
            return
        for run in _runs(indexes):
            self._on_arrival(key, run.start, len(run))

    def _on_route_failure(self, route_key: TransferKey, error: TransferError) -> None:
        with self._lock:
            key = self._transfer_of.get(route_key)
            if key is not None:
                if self._ranked[key].failed:
                    return
                self._ranked[key].failed = True
        if key is not None or self._is_single:
            self._on_failure(key or route_key, error)


def _runs(indexes: Sequence[int]) -> list[range]:
    """Joins consecutive indexes into ranges, in order."""
    runs: list[range] = []
    for index in indexes:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
