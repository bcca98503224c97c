"""A one-sided wire between fake engines, held still: pages are written when a test says so, also into closed transfers.

Stands in for senders and receivers of KV where decision code plays out under every order of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.kv_layout import KVLayout
from kv_transfer.reshard import Plan, make_plan
from kv_transfer.staging import PageParts, page_parts
from kv_transfer.transport import WHOLE, Part
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferKey
from tests.fake_engine import FakeEngine

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, page_size=4, head_dim=1, dtype="float32", model_revision="fake")


@dataclass
class Write:
    """One page under way: read from the source when it completes, as a one-sided wire may."""

    index: int
    parts: PageParts  # of the source's pages
    dst: PageId

    def content(self, source: FakeEngine, page_size: int) -> list[int | None]:
        """What the source's pages hold now, as a page of the target's."""
        content: list[int | None] = [None] * page_size
        for part in self.parts:
            (page,) = source.read([part.page])
            taken = page[part.source_token : part.source_token + part.num_tokens]
            content[part.target_token : part.target_token + part.num_tokens] = taken
        return content


@dataclass
class Link:
    """The sender's side of one transfer."""

    writes: deque[Write] = field(default_factory=deque)
    ending: bool = False
    aborted: bool = False


class FakeReceiver:
    def __init__(self) -> None:
        self.open_keys: set[TransferKey] = set()
        self.quieting: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []  # writes that were on their way when their sender gave up

    def open(self, key: TransferKey, pages: list[PageId], timeout_s: float) -> None:
        self.open_keys.add(key)

    def close(self, key: TransferKey) -> None:
        self.open_keys.discard(key)

    def when_quiet(self, then: Callable[[], None]) -> None:
        self.quieting.append(then)


class FakeSender:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.links: dict[TransferKey, Link] = {}

    def open(self, key: TransferKey, offer: bytes, lane: Lane) -> Plan:
        self.links[key] = Link()
        return self.plan

    def num_parts(self, key: TransferKey) -> int:
        return 1

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: list[PageId],
        dst_pages: list[PageId],
        part: Part,
    ) -> None:
        assert part == WHOLE
        pairs = zip(page_parts(self.plan, tokens, src_pages), dst_pages, strict=True)
        self.links[key].writes += [Write(first_index + i, parts, dst) for i, (parts, dst) in enumerate(pairs)]

    def finish(self, key: TransferKey) -> None:
        self.links[key].ending = True

    def abort(self, key: TransferKey) -> None:
        link = self.links[key]
        link.ending = link.aborted = True
        while len(link.writes) > 1:  # the oldest is under way and cannot be called back
            link.writes.pop()


class BreakableSender:
    """A sender whose link to a target may die under it."""

    def __init__(self, page_size: int, find_size: Callable[[Epoch], int]) -> None:
        self.page_size = page_size
        self.find_size = find_size  # of an incarnation's pages
        self.links: dict[TransferKey, Link] = {}
        self.refuse = ""  # the next one, and why

    def open(self, key: TransferKey, offer: bytes, lane: Lane) -> Plan:
        refuse, self.refuse = self.refuse, ""
        if refuse:
            raise TransferError(refuse)
        self.links[key] = Link()
        return self.plan(key)

    def plan(self, key: TransferKey) -> Plan:
        target_size = self.find_size(key.receiver_epoch)
        return make_plan(replace(LAYOUT, page_size=self.page_size), replace(LAYOUT, page_size=target_size))

    def push_tokens(
        self, key: TransferKey, first_index: int, tokens: range, src_pages: list[PageId], dst_pages: list[PageId]
    ) -> None:
        if key in self.links:
            pairs = zip(page_parts(self.plan(key), tokens, src_pages), dst_pages, strict=True)
            self.links[key].writes += [Write(first_index + i, parts, dst) for i, (parts, dst) in enumerate(pairs)]

    def finish(self, key: TransferKey) -> None:
        if key in self.links:
            self.links[key].ending = True

    def abort(self, key: TransferKey) -> None:
        link = self.links.get(key)
        if link is not None:
            link.ending = True
            while len(link.writes) > 1:  # the oldest is under way and cannot be called back
                link.writes.pop()
