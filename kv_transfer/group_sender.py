"""The sending end of a worker's transfers, of however many ranks either end is made: one `TransferSender` a rank.

Between whoever hands in pages and the senders; it has the methods of one. A transfer opens as its strands
(kv_transfer/strands.py), each pushed by the rank that has its heads, and is over when all of them are: source pages are
the same on every rank, and so are their fates. What other ranks do they are told over their channel, behind the step
that fills the pages.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.shard import shard_layouts
from kv_transfer.checksum import join_checksums, part_checksums
from kv_transfer.handshake import parse_offer
from kv_transfer.links import SenderStats
from kv_transfer.rank_ends import RankEnd, key_to_plain
from kv_transfer.reshard import Plan, make_plan, page_rows
from kv_transfer.sender import OnDone, OnFailure, TransferSender
from kv_transfer.staging import sent_checksums
from kv_transfer.strands import Strand, check_ranks, plan_strands, rank_epoch, split_offer
from kv_transfer.transport import WHOLE, Part
from penstock.config import TransferConfig
from penstock.errors import TransferError, TransferRefused
from penstock.types import Epoch, Lane, PageId, TransferKey


@dataclass(slots=True)
class _Outgoing:
    strands: list[tuple[Strand, TransferKey, Plan]]
    open: set[TransferKey] = field(default_factory=set)  # strands that are not over
    failed: bool = False


class GroupSender:
    """Safe from any thread. Callbacks run on threads of the senders and of the ranks, and must not block."""

    def __init__(
        self, engine: Engine, epoch: Epoch, config: TransferConfig, on_done: OnDone, on_failure: OnFailure
    ) -> None:
        """Blocks while every rank makes its own. Raises ConfigError when the configured wire cannot be used here."""
        self._kv_pages = engine.kv_pages
        self._num_ranks = engine.num_ranks
        self._layouts = shard_layouts(engine.model_layout, engine.num_ranks)
        self._num_kv_heads = engine.model_layout.num_kv_heads
        self._on_done = on_done
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._transfers: dict[TransferKey, _Outgoing] = {}
        self._of: dict[TransferKey, TransferKey] = {}  # strand to transfer
        self._own = TransferSender(
            engine.kv_pages, engine.layout, rank_epoch(epoch, 0), config, self._on_strand_done, self._on_strand_failure
        )
        self._end: RankEnd | None = None
        if engine.ranks is not None:
            self._end = RankEnd(engine.ranks, "sender", epoch, config)
            self._end.on_done(self._on_strand_done)
            self._end.on_failure(self._on_strand_failure)

    @property
    def transports(self) -> list[str]:
        return self._own.transports

    @property
    def stats(self) -> SenderStats:
        """Of rank 0's part."""
        return self._own.stats

    def open(self, key: TransferKey, offer: bytes, lane: Lane = Lane.STANDARD) -> Plan:
        """As `TransferSender.open`. The plan is that of one strand: its page sizes are everybody's."""
        strands = self._plan(key, offer)
        with self._lock:
            if key in self._transfers:
                raise TransferError(f"transfer {key.transfer_id}: already open")
            planned = [(strand, strand_key, plan) for strand, strand_key, plan, _ in strands]
            self._transfers[key] = _Outgoing(planned, {strand_key for _, strand_key, _ in planned})
            self._of.update({strand_key: key for _, strand_key, _ in planned})
        opened: list[TransferKey] = []
        try:
            for strand, strand_key, _, of_strand in strands:
                if strand.sender == 0:
                    self._own.open(strand_key, of_strand, lane)
                    opened.append(strand_key)
        except TransferError:
            with self._lock:
                del self._transfers[key]
                for _, strand_key, _ in planned:
                    del self._of[strand_key]
            for strand_key in opened:
                self._own.abort(strand_key)
            raise
        for strand, strand_key, _, of_strand in strands:
            if strand.sender != 0:
                self._tell(strand, "open", [key_to_plain(strand_key), of_strand, lane.value])
        return strands[0][2]

    def _plan(self, key: TransferKey, offer: bytes) -> list[tuple[Strand, TransferKey, Plan, bytes]]:
        """Each strand with its key, its plan and its offer. Raises TransferError, TransferRefused."""
        num_senders, num_receivers, offers = split_offer(offer)
        if num_senders != self._num_ranks:
            raise TransferError(
                f"offer.ranks: made for {num_senders} sending ranks, this worker has {self._num_ranks}; ask it anew"
            )
        strands = plan_strands(self._num_kv_heads, num_senders, num_receivers)
        if len(strands) != len(offers):
            raise TransferError(f"offer.offers: {len(offers)}, want {len(strands)}: one a strand")
        planned: list[tuple[Strand, TransferKey, Plan, bytes]] = []
        for strand, of_strand in zip(strands, offers, strict=True):
            parsed = parse_offer(of_strand)
            heads = range(*parsed.heads) if parsed.heads else None
            plan = make_plan(self._layouts[strand.sender], parsed.layout, heads)
            if planned and plan.target.page_size != planned[0][2].target.page_size:
                raise TransferRefused("the receiver's ranks have pages of different sizes; give all of them one")
            planned.append((strand, strand.key(key), plan, of_strand))
        return planned

    def push(
        self, key: TransferKey, first_index: int, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]
    ) -> None:
        """As `TransferSender.push`, on every rank."""
        for strand, strand_key, _ in self._strands(key):
            if strand.sender == 0:
                self._own.push(strand_key, first_index, src_pages, dst_pages)
            else:
                body = [key_to_plain(strand_key), first_index, list(src_pages), list(dst_pages)]
                self._tell(strand, "push", body)

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        part: Part = WHOLE,
    ) -> None:
        """As `TransferSender.push_tokens`, on every rank that has a strand."""
        for strand, strand_key, _ in self._strands(key):
            if strand.sender == 0:
                self._own.push_tokens(strand_key, first_index, tokens, src_pages, dst_pages, part)
            else:
                span = [tokens.start, tokens.stop]
                body = [key_to_plain(strand_key), first_index, span, list(src_pages), list(dst_pages)]
                self._tell(strand, "push_tokens", body)

    def num_parts(self, key: TransferKey) -> int:
        """As `TransferSender.num_parts`: whole pages, where there is more than one strand."""
        return self._own.num_parts(key) if len(self._strands(key)) == 1 else 1

    def sent_checksums(self, key: TransferKey, tokens: range, src_pages: Sequence[PageId]) -> list[int]:
        """Of each page of the receiver's that `tokens` make, over all of its ranks. Blocks."""
        found: list[list[int]] = []
        for strand, strand_key, plan in self._strands(key):
            if strand.sender == 0:
                found.append(sent_checksums(plan, self._kv_pages, tokens, src_pages))
            else:
                body = [key_to_plain(strand_key), [tokens.start, tokens.stop], list(src_pages)]
                assert self._end is not None
                found.append(self._end.ask(strand.sender, "sent_checksums", body))
        return join_checksums(found)

    def checksums(self, pages: Sequence[PageId], num_receivers: int) -> list[int]:
        """Of pages of the pool, as a receiver of so many ranks with the same layout will find them in its own. Blocks.
        Raises TransferError where so many cannot share the heads."""
        check_ranks(self._num_kv_heads, num_receivers, "receiver")
        found: list[list[int]] = []
        for strand in plan_strands(self._num_kv_heads, self._num_ranks, num_receivers):
            if strand.sender == 0:
                found.append(part_checksums(self._kv_pages, pages, page_rows(self._layouts[0], strand.heads)))
            else:
                assert self._end is not None
                body = [[strand.heads.start, strand.heads.stop], list(pages)]
                found.append(self._end.ask(strand.sender, "part_checksums", body))
        return join_checksums(found)

    def finish(self, key: TransferKey) -> None:
        """As `TransferSender.finish`."""
        for strand, strand_key, _ in self._strands(key):
            if strand.sender == 0:
                self._own.finish(strand_key)
            else:
                self._tell(strand, "finish", key_to_plain(strand_key))

    def abort(self, key: TransferKey) -> None:
        """As `TransferSender.abort`."""
        for strand, strand_key, _ in self._strands(key):
            if strand.sender == 0:
                self._own.abort(strand_key)
            else:
                self._tell(strand, "abort", key_to_plain(strand_key))

    def is_open(self, key: TransferKey) -> bool:
        """Whether any rank may still write."""
        with self._lock:
            return key in self._transfers

    def shutdown(self) -> None:
        """As `TransferSender.shutdown`."""
        self._own.shutdown()
        if self._end is not None:
            self._end.close()

    def _strands(self, key: TransferKey) -> list[tuple[Strand, TransferKey, Plan]]:
        with self._lock:
            outgoing = self._transfers.get(key)
            return outgoing.strands if outgoing is not None else []

    def _tell(self, strand: Strand, what: str, body: object) -> None:
        assert self._end is not None
        self._end.tell(strand.sender, what, body)

    def _on_strand_done(self, strand_key: TransferKey) -> None:
        with self._lock:
            key = self._of.pop(strand_key, None)
            if key is None:
                return  # of a transfer that another rank could not open
            outgoing = self._transfers[key]
            outgoing.open.discard(strand_key)
            if outgoing.open:
                return
            del self._transfers[key]
        self._on_done(key)

    def _on_strand_failure(self, strand_key: TransferKey, error: TransferError) -> None:
        """A transfer without one of its strands is of no use: the others stop too."""
        with self._lock:
            key = self._of.get(strand_key)
            if key is None or self._transfers[key].failed:
                return
            self._transfers[key].failed = True
        self._on_failure(key, error)
        self.abort(key)
