"""Provides a one-sided transport between fake engines that writes a page only when a test lets it, even into closed
transfers.

Replaces senders and receivers of KV in tests that run decision code under random orders of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.cache.kv_layout import KVLayout
from kv_transfer.layout.reshard import ReshardPlan, plan_reshard
from kv_transfer.layout.staging import PageSlices, page_slices
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferKey
from tests.support.engine.fake_engine import FakeEngine

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, page_size=4, head_dim=1, dtype="float32", model_revision="fake")


Content = tuple[list[int | None], list[int | None] | None]  # of a page, and of its windowed part


@dataclass
class Write:
    """Represents a page in flight. It is read from the source when it completes, as a one-sided transport may do."""

    index: int
    slices: PageSlices  # pages of the source
    dst: PageId
    slots: tuple[int, int] | None = None  # of its windowed part at the source and at the target, if that moves too

    def read(self, source: FakeEngine, page_size: int) -> Content:
        """Returns what it would write now, into a page of `page_size` tokens."""
        part = None if self.slots is None else list(source.window_kv[self.slots[0]])
        return self.content(source, page_size), part

    def land(self, target: FakeEngine, content: Content) -> None:
        target.kv_pages[self.dst], part = content
        if self.slots is not None and part is not None:
            assert target.pool.parts is not None
            assert target.pool.parts.slot_of_P[self.dst] == self.slots[1], "a slot is written that others may use"
            target.window_kv[self.slots[1]] = part

    def content(self, source: FakeEngine, page_size: int) -> list[int | None]:
        """Returns the current content of the source's pages, as a page of the target."""
        content: list[int | None] = [None] * page_size
        for taken in self.slices:
            (page,) = source.read([taken.page])
            tokens = page[taken.source_token : taken.source_token + taken.num_tokens]
            content[taken.target_token : taken.target_token + taken.num_tokens] = tokens
        return content


@dataclass
class Link:
    """Represents the sender's side of one transfer."""

    writes: deque[Write] = field(default_factory=deque)
    ending: bool = False
    aborted: bool = False
    window_slots: Mapping[PageId, int] = field(default_factory=dict)  # by page of the target

    def add(self, engine: FakeEngine | None, first_index: int, pages: Seq[PageSlices], dst_pages: Seq[PageId]) -> None:
        """Adds a write for each page; `engine` is the source's."""
        for index, (slices, dst) in enumerate(zip(pages, dst_pages, strict=True), start=first_index):
            slots = None
            if engine is not None and dst in self.window_slots:
                assert engine.pool.parts is not None
                [source] = engine.pool.parts.slots_of([slices[0].page])
                slots = source, self.window_slots[dst]
            self.writes.append(Write(index, slices, dst, slots))


def slots_by_page(pages: Seq[PageId], window_slots: Seq[int]) -> Mapping[PageId, int]:
    """Returns the slots of the last of these pages."""
    return dict(zip(pages[len(pages) - len(window_slots) :], window_slots, strict=True))


class FakeReceiver:
    def __init__(self) -> None:
        self.open_keys: set[TransferKey] = set()
        self.num_forgotten = 0  # of the next transfers, whose sender is forgotten after its offer
        self.settling: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []  # writes that were in flight when their sender gave up

    def open(self, key: TransferKey, pages: list[PageId], timeout_s: float) -> None:
        if self.num_forgotten:
            self.num_forgotten -= 1
            raise TransferError(f"transfer {key.transfer_id}: its sender is not known here, or was forgotten")
        self.open_keys.add(key)

    def close(self, key: TransferKey) -> None:
        self.open_keys.discard(key)

    def after_stray_writes(self, then: Callable[[], None]) -> None:
        self.settling.append(then)


class FakeSender:
    def __init__(self, plan: ReshardPlan, engine: FakeEngine | None = None) -> None:
        self.plan = plan
        self.engine = engine
        self.links: dict[TransferKey, Link] = {}

    def place(self, key: TransferKey, num_held: int, dst_pages: Seq[PageId], window_slots: Seq[int]) -> None:
        self.links[key].window_slots = slots_by_page(dst_pages, window_slots)

    def open(self, key: TransferKey, offer: bytes, lane: Lane) -> ReshardPlan:
        self.links[key] = Link()
        return self.plan

    def num_layer_groups(self, key: TransferKey) -> int:
        return 1

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: list[PageId],
        dst_pages: list[PageId],
        layer_group: LayerGroup,
    ) -> None:
        assert layer_group == ALL_LAYERS
        self.links[key].add(self.engine, first_index, page_slices(self.plan, tokens, src_pages), dst_pages)

    def finish(self, key: TransferKey) -> None:
        self.links[key].ending = True

    def abort(self, key: TransferKey) -> None:
        link = self.links[key]
        link.ending = link.aborted = True
        while len(link.writes) > 1:  # the oldest write is in flight and cannot be recalled
            link.writes.pop()


class BreakableSender:
    """Sends over a link that may break at any moment."""

    def __init__(self, page_size: int, find_size: Callable[[Epoch], int], engine: FakeEngine) -> None:
        self.engine = engine
        self.page_size = page_size
        self.find_size = find_size  # page sizes by epoch
        self.links: dict[TransferKey, Link] = {}
        self.refuse = ""  # a reason to refuse the next transfer

    def open(self, key: TransferKey, offer: bytes, lane: Lane) -> ReshardPlan:
        refuse, self.refuse = self.refuse, ""
        if refuse:
            raise TransferError(refuse)
        self.links[key] = Link()
        return self.plan(key)

    def plan(self, key: TransferKey) -> ReshardPlan:
        target_size = self.find_size(key.receiver_epoch)
        return plan_reshard(replace(LAYOUT, page_size=self.page_size), replace(LAYOUT, page_size=target_size))

    def push_tokens(
        self, key: TransferKey, first_index: int, tokens: range, src_pages: list[PageId], dst_pages: list[PageId]
    ) -> None:
        if key in self.links:
            self.links[key].add(self.engine, first_index, page_slices(self.plan(key), tokens, src_pages), dst_pages)

    def place(self, key: TransferKey, num_held: int, dst_pages: Seq[PageId], window_slots: Seq[int]) -> None:
        self.links[key].window_slots = slots_by_page(dst_pages, window_slots)

    def finish(self, key: TransferKey) -> None:
        if key in self.links:
            self.links[key].ending = True

    def abort(self, key: TransferKey) -> None:
        link = self.links.get(key)
        if link is not None:
            link.ending = True
            while len(link.writes) > 1:  # the oldest write is in flight and cannot be recalled
                link.writes.pop()
