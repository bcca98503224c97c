"""Provides a one-sided transport between fake engines that writes a page only when a test lets it, even into closed
transfers.

Replaces senders and receivers of KV in tests that run decision code under random orders of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.cache.kv_layout import KVLayout
from kv_transfer.layout.reshard import ReshardPlan, plan_reshard
from kv_transfer.layout.staging import PageSlices, page_slices
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferKey
from tests.support.engine.fake_engine import FakeEngine

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, page_size=4, head_dim=1, dtype="float32", model_revision="fake")


@dataclass
class Write:
    """Represents a page in flight. It is read from the source when it completes, as a one-sided transport may do."""

    index: int
    slices: PageSlices  # pages of the source
    dst: PageId

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
    def __init__(self, plan: ReshardPlan) -> None:
        self.plan = plan
        self.links: dict[TransferKey, Link] = {}

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
        pairs = zip(page_slices(self.plan, tokens, src_pages), dst_pages, strict=True)
        self.links[key].writes += [Write(first_index + i, slices, dst) for i, (slices, dst) in enumerate(pairs)]

    def finish(self, key: TransferKey) -> None:
        self.links[key].ending = True

    def abort(self, key: TransferKey) -> None:
        link = self.links[key]
        link.ending = link.aborted = True
        while len(link.writes) > 1:  # the oldest write is in flight and cannot be recalled
            link.writes.pop()


class BreakableSender:
    """Sends over a link that may break at any moment."""

    def __init__(self, page_size: int, find_size: Callable[[Epoch], int]) -> None:
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
            pairs = zip(page_slices(self.plan(key), tokens, src_pages), dst_pages, strict=True)
            self.links[key].writes += [Write(first_index + i, slices, dst) for i, (slices, dst) in enumerate(pairs)]

    def finish(self, key: TransferKey) -> None:
        if key in self.links:
            self.links[key].ending = True

    def abort(self, key: TransferKey) -> None:
        link = self.links.get(key)
        if link is not None:
            link.ending = True
            while len(link.writes) > 1:  # the oldest write is in flight and cannot be recalled
                link.writes.pop()
