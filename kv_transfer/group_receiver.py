"""The receiving end of a worker's transfers, of however many ranks either end is made: one `TransferReceiver` a rank.

Between whoever opens transfers and the receivers; it has the methods of one. A transfer is open on every rank, as its
strands (kv_transfer/strands.py); a page has arrived when it has on all of them, from every rank that makes a part of
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.engine import Engine
from engine.shard import shard_layouts
from kv_transfer.checksum import join_checksums, part_checksums
from kv_transfer.rank_ends import RankEnd, key_to_plain
from kv_transfer.receiver import OnArrival, OnFailure, ReceiverStats, TransferReceiver
from kv_transfer.reshard import page_rows
from kv_transfer.strands import Strand, check_ranks, join_offers, plan_strands, rank_epoch, rank_name
from kv_transfer.transport import Peer
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey, WorkerId


@dataclass(slots=True)
class _Incoming:
    strands: tuple[Strand, ...]
    landed: dict[int, set[TransferKey]] = field(default_factory=dict)  # index: strands; of pages that are not complete
    failed: bool = False


class GroupReceiver:
    """Safe from any thread. Callbacks run on threads of the receivers and of the ranks, and must not block."""

    def __init__(
        self, engine: Engine, epoch: Epoch, config: TransferConfig, on_arrival: OnArrival, on_failure: OnFailure
    ) -> None:
        """Blocks while every rank makes its own. Raises ConfigError when the configured wire cannot be used here."""
        self._kv_pages = engine.kv_pages
        self._num_ranks = engine.num_ranks
        self._layouts = shard_layouts(engine.model_layout, engine.num_ranks)
        self._num_kv_heads = engine.model_layout.num_kv_heads
        self._on_arrival = on_arrival
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._peers: dict[WorkerId, Peer] = {}
        self._peer_ranks: dict[Epoch, int] = {}  # of those that are known
        self._open: dict[TransferKey, _Incoming] = {}
        self._of: dict[TransferKey, TransferKey] = {}  # strand to transfer
        self._tokens = count(1)
        self._quieting: dict[int, tuple[int, Callable[[], None]]] = {}  # by token: how many ranks are to come
        self._own = TransferReceiver(
            engine.kv_pages,
            engine.layout,
            rank_epoch(epoch, 0),
            config,
            self._on_strand_arrival,
            self._on_strand_failure,
        )
        self._end: RankEnd | None = None
        if engine.ranks is not None:
            self._end = RankEnd(engine.ranks, "receiver", epoch, config)
            self._end.on_arrival(self._on_strand_arrival)
            self._end.on_failure(self._on_strand_failure)
            self._end.on_quiet(self._is_quiet)

    @property
    def transports(self) -> list[str]:
        return self._own.transports

    @property
    def stats(self) -> ReceiverStats:
        """Of rank 0's part."""
        return self._own.stats

    def offer(self, peer_worker_id: WorkerId, peer_epoch: Epoch, num_ranks: int = 1) -> bytes:
        """What that incarnation, of so many ranks, needs to push here. As `TransferReceiver.offer`."""
        check_ranks(self._num_kv_heads, num_ranks, "sender")
        with self._lock:
            known = self._peers.get(peer_worker_id)
            if known is not None and known.epoch < peer_epoch:
                self._peer_ranks.pop(known.epoch, None)
            self._peers[peer_worker_id] = Peer(peer_worker_id, peer_epoch)
            self._peer_ranks[peer_epoch] = num_ranks
        strands = plan_strands(self._num_kv_heads, num_ranks, self._num_ranks)
        return join_offers(
            num_ranks, self._num_ranks, [self._offer(one, peer_worker_id, peer_epoch) for one in strands]
        )

    def _offer(self, strand: Strand, worker_id: WorkerId, epoch: Epoch) -> bytes:
        name, own_epoch = rank_name(worker_id, strand.sender), rank_epoch(epoch, strand.sender)
        if strand.receiver == 0:
            return self._own.offer(name, own_epoch, strand.heads)
        assert self._end is not None
        body = [name, own_epoch, [strand.heads.start, strand.heads.stop]]
        offer = self._end.ask_at_once(strand.receiver, "offer", body)
        assert isinstance(offer, bytes)
        return offer

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float | None = None) -> None:
        """As `TransferReceiver.open`, on every rank."""
        with self._lock:
            if key in self._open:
                raise TransferError(f"transfer {key.transfer_id}: already open")
            num_ranks = self._peer_ranks.get(key.sender_epoch, 1)
            strands = plan_strands(self._num_kv_heads, num_ranks, self._num_ranks)
            self._open[key] = _Incoming(strands)
            self._of.update({strand.key(key): key for strand in strands})
        for strand in strands:
            if strand.receiver == 0:
                self._own.open(strand.key(key), pages, timeout_s)
            else:
                self._ask(strand, "open", [key_to_plain(strand.key(key)), list(pages), timeout_s])

    def close(self, key: TransferKey) -> None:
        """As `TransferReceiver.close`, on every rank."""
        with self._lock:
            incoming = self._open.pop(key, None)
            strands = incoming.strands if incoming is not None else ()
            for strand in strands:
                self._of.pop(strand.key(key), None)
        for strand in strands:
            if strand.receiver == 0:
                self._own.close(strand.key(key))
            else:
                self._ask(strand, "close", key_to_plain(strand.key(key)))

    def when_quiet(self, then: Callable[[], None]) -> None:
        """As `TransferReceiver.when_quiet`: on every rank."""
        if self._end is None:
            self._own.when_quiet(then)
            return
        token = next(self._tokens)
        with self._lock:
            self._quieting[token] = (self._num_ranks, then)
        self._own.when_quiet(lambda: self._is_quiet(token))
        for rank in range(1, self._num_ranks):
            self._end.ask_at_once(rank, "quiet", token)

    def _is_quiet(self, token: int) -> None:
        with self._lock:
            left, then = self._quieting[token]
            if left > 1:
                self._quieting[token] = (left - 1, then)
                return
            del self._quieting[token]
        then()

    def forget(self, peer: Peer) -> None:
        """As `TransferReceiver.forget`: every rank of that incarnation, on every rank."""
        with self._lock:
            num_ranks = self._peer_ranks.pop(peer.epoch, 1)
            if self._peers.get(peer.worker_id) == peer:
                del self._peers[peer.worker_id]
        for rank in range(num_ranks):
            one = Peer(rank_name(peer.worker_id, rank), rank_epoch(peer.epoch, rank))
            self._own.forget(one)
            for receiver in range(1, self._num_ranks):
                assert self._end is not None
                self._end.ask_at_once(receiver, "forget", list(one))

    def checksums(self, key: TransferKey, pages: Sequence[PageId]) -> list[int]:
        """Of what the transfer has brought into these pages: what the sender's `sent_checksums` or `checksums` are held
        against. Blocks."""
        with self._lock:
            incoming = self._open.get(key)
            num_ranks = self._peer_ranks.get(key.sender_epoch, 1)
        strands = incoming.strands if incoming else plan_strands(self._num_kv_heads, num_ranks, self._num_ranks)
        found: list[list[int]] = []
        for strand in strands:
            if strand.receiver == 0:
                found.append(part_checksums(self._kv_pages, pages, page_rows(self._layouts[0], strand.heads)))
            else:
                assert self._end is not None
                body = [[strand.heads.start, strand.heads.stop], list(pages)]
                found.append(self._end.ask(strand.receiver, "part_checksums", body))
        return join_checksums(found)

    def shutdown(self) -> None:
        """As `TransferReceiver.shutdown`."""
        self._own.shutdown()
        if self._end is not None:
            self._end.close()

    def _ask(self, strand: Strand, what: str, body: object) -> None:
        assert self._end is not None
        self._end.ask_at_once(strand.receiver, what, body)

    def _on_strand_arrival(self, strand_key: TransferKey, first_index: int, num_pages: int) -> None:
        with self._lock:
            key = self._of.get(strand_key)
            incoming = self._open.get(key) if key is not None else None
            if key is None or incoming is None:
                return  # closed meanwhile
            complete = range(first_index, first_index + num_pages)
            if len(incoming.strands) > 1:
                complete_ones = [index for index in complete if _is_complete(incoming, index, strand_key)]
            else:
                complete_ones = list(complete)
        for run in _runs(complete_ones):
            self._on_arrival(key, run.start, len(run))

    def _on_strand_failure(self, strand_key: TransferKey, error: TransferError) -> None:
        with self._lock:
            key = self._of.get(strand_key)
            if key is None or self._open[key].failed:
                return
            self._open[key].failed = True
        self._on_failure(key, error)


def _is_complete(incoming: _Incoming, index: int, strand_key: TransferKey) -> bool:
    """Takes note of a strand's part of a page; whether it was the last one."""
    landed = incoming.landed.setdefault(index, set())
    landed.add(strand_key)
    return len(landed) == len(incoming.strands)


def _runs(indexes: Sequence[int]) -> list[range]:
    """Of neighbours, in order."""
    runs: list[range] = []
    for index in indexes:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
