"""Tests the queue of pushes to one receiver: order, bounds, readiness, and exactly one end for each transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kv_transfer.send.send_queue import (
    HANDICAP_BYTES,
    MAX_BULK_BYTES,
    MAX_INFLIGHT_BYTES,
    OutgoingTransfer,
    QueuedPush,
    SendQueue,
)
from kv_transfer.transports.transport import ALL_LAYERS, MAX_PUSH_BYTES, Arrival, LayerGroup
from penstock.errors import TransferError
from penstock.types import Lane, PageId, TransferKey
from tests.support.transfer.transfer_pair import key

PAGE_BYTES = 1 << 20


@dataclass
class FakePush:
    ended: bool = False
    error: TransferError | None = None

    def done(self) -> bool:
        if self.error:
            raise self.error
        return self.ended


@dataclass
class FakeLink:
    needs_polling: bool = True
    max_push_bytes: int = MAX_PUSH_BYTES
    takes_layer_groups: bool = False
    gains_from_layer_groups: bool = False
    posted: list[tuple[Arrival, FakePush]] = field(default_factory=list)
    dead: TransferError | None = None
    refused: TransferKey | None = None  # the transfer whose pushes cannot be posted

    def push(
        self,
        arrival: Arrival,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> FakePush:
        self.check()
        if arrival.key == self.refused:
            raise TransferError("a page is out of reach")
        assert len(src_pages) == len(dst_pages) == arrival.num_pages
        push = FakePush()
        self.posted.append((arrival, push))
        return push

    def check(self) -> None:
        if self.dead:
            raise self.dead

    def close(self) -> None:
        self.dead = TransferError("closed")


@dataclass
class FakeReadyEvent:
    ready: bool = False
    num_queries: int = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.ready


def make(num_transfers: int = 1) -> tuple[SendQueue, FakeLink, list[OutgoingTransfer]]:
    link = FakeLink()
    send_queue = SendQueue(PAGE_BYTES, link)
    transfers = [OutgoingTransfer(key(number)) for number in range(num_transfers)]
    send_queue.transfers = {transfer.key: transfer for transfer in transfers}
    return send_queue, link, transfers


def item(transfer: OutgoingTransfer, first: int, count: int, ready: FakeReadyEvent | None = None) -> QueuedPush:
    numbers = [PageId(page) for page in range(first, first + count)]
    return QueuedPush(transfer, first, numbers, numbers, ready)


def test_a_large_push_is_split_and_bounded() -> None:
    send_queue, link, (transfer,) = make()
    step, limit = MAX_PUSH_BYTES // PAGE_BYTES, MAX_INFLIGHT_BYTES // PAGE_BYTES
    send_queue.add(item(transfer, 0, 3 * limit))
    send_queue.post(0.0)
    assert [(arrival.first_index, arrival.num_pages) for arrival, _ in link.posted[:2]] == [(0, step), (step, step)]
    assert len(link.posted) * step == limit
    transfer.finishing = True
    while not transfer.over:
        for _, push in link.posted:
            push.ended = True
        send_queue.reap(1.0)
        send_queue.post(1.0)
        assert sum(not push.ended for _, push in link.posted) * step <= limit
    assert [arrival.first_index for arrival, _ in link.posted] == list(range(0, 3 * limit, step))
    assert send_queue.num_pages_sent == 3 * limit
    assert send_queue.pop_over() == [transfer]
    assert send_queue.pop_over() == []


def posted(link: FakeLink) -> list[int]:
    """Returns the numbers of the transfers in the order of their pushes."""
    return [int(arrival.key.transfer_id[1:]) for arrival, _ in link.posted]


def drain(send_queue: SendQueue, link: FakeLink, now_s: float = 0.0) -> None:
    """Posts until nothing is left; every write ends at once."""
    while send_queue.post(now_s):
        for _, push in link.posted:
            push.ended = True
        send_queue.reap(now_s)


def test_interactive_pages_are_sent_first_and_bulk_pages_last() -> None:
    send_queue, link, (bulk, standard, interactive) = make(3)
    bulk.lane, interactive.lane = Lane.BULK, Lane.INTERACTIVE
    for transfer in (bulk, standard, interactive):
        send_queue.add(item(transfer, 0, 12))  # two parts each
    drain(send_queue, link)
    assert posted(link) == [2, 2, 1, 1, 0, 0]
    assert [arrival.first_index for arrival, _ in link.posted] == [0, 8] * 3


def test_bulk_pushes_leave_room_for_other_lanes() -> None:
    send_queue, link, (bulk, interactive) = make(2)
    bulk.lane, interactive.lane = Lane.BULK, Lane.INTERACTIVE
    send_queue.add(item(bulk, 0, 200))
    send_queue.post(0.0)
    assert len(link.posted) * MAX_PUSH_BYTES == MAX_BULK_BYTES
    send_queue.add(item(interactive, 0, 200))
    send_queue.post(0.0)
    assert posted(link)[2:] == [1] * (len(link.posted) - 2)
    assert len(link.posted) * MAX_PUSH_BYTES == MAX_INFLIGHT_BYTES


def test_an_overtaken_lane_is_served_after_its_handicap() -> None:
    """Queues more interactive pages than the link takes; a standard page waits for its handicap and no longer."""
    send_queue, link, (standard, interactive) = make(2)
    interactive.lane = Lane.INTERACTIVE
    window = MAX_INFLIGHT_BYTES // PAGE_BYTES
    send_queue.add(item(standard, 0, 1))
    for rounds in range(100):
        send_queue.add(item(interactive, rounds * 2 * window, 2 * window))
        send_queue.post(0.0)
        for _, push in link.posted:
            push.ended = True
        send_queue.reap(0.0)
        if 0 in posted(link):
            break
    assert HANDICAP_BYTES[Lane.STANDARD] <= rounds * MAX_INFLIGHT_BYTES <= HANDICAP_BYTES[Lane.STANDARD] * 2


def test_ready_pages_overtake_more_urgent_unready_ones() -> None:
    send_queue, link, (standard, interactive) = make(2)
    interactive.lane = Lane.INTERACTIVE
    events = [FakeReadyEvent(), FakeReadyEvent(), FakeReadyEvent()]
    for transfer, first, event in ((standard, 0, events[0]), (interactive, 0, events[1]), (standard, 1, events[2])):
        send_queue.add(item(transfer, first, 1, event))
    events[0].ready = True
    send_queue.post(0.0)
    assert posted(link) == [0]
    assert send_queue.waits_for_polling
    for event in events:
        event.ready = True
    send_queue.post(0.0)
    assert posted(link) == [0, 1, 0]


def test_a_push_waits_until_its_pages_are_computed() -> None:
    send_queue, link, (transfer,) = make()
    event = FakeReadyEvent()
    send_queue.add(item(transfer, 0, 1, event))
    send_queue.post(0.0)
    assert link.posted == []
    assert send_queue.waits_for_polling
    event.ready = True
    send_queue.post(0.0)
    assert len(link.posted) == 1


def test_an_aborted_transfer_ends_after_its_writes_in_flight() -> None:
    send_queue, link, (aborted, other) = make(2)
    send_queue.add(item(aborted, 0, 1))
    send_queue.post(0.0)
    send_queue.add(item(aborted, 1, 1))
    send_queue.add(item(other, 0, 1))
    aborted.aborted = True
    send_queue.post(0.0)
    assert [arrival.key for arrival, _ in link.posted] == [aborted.key, other.key]
    assert send_queue.pop_over() == []
    link.posted[0][1].ended = True
    send_queue.reap(0.0)
    assert send_queue.pop_over() == [aborted]


def test_a_failed_push_fails_only_its_transfer() -> None:
    send_queue, link, (failing, other) = make(2)
    for transfer in (failing, other):
        send_queue.add(item(transfer, 0, 1))
    send_queue.post(0.0)
    link.posted[0][1].error = TransferError("the receiver has closed it")
    link.posted[1][1].ended = other.finishing = True
    send_queue.reap(0.0)
    assert send_queue.pop_over() == [failing, other]
    assert failing.error is not None
    assert other.error is None


def test_a_push_that_cannot_be_posted_ends_only_its_transfer() -> None:
    send_queue, link, (refused, other) = make(2)
    link.refused = refused.key
    for transfer in (refused, other):
        send_queue.add(item(transfer, 0, 1))
    assert send_queue.post(0.0)
    assert posted(link) == [1]
    assert send_queue.pop_over() == [refused]
    assert refused.error is not None
    assert send_queue.transfers == {other.key: other}


def test_pages_behind_unready_ones_of_their_stream_are_not_queried() -> None:
    """Chunks complete in the order in which they were queued, and each query costs a call to the device."""
    send_queue, link, (transfer, urgent) = make(2)
    urgent.lane = Lane.INTERACTIVE
    early, late = FakeReadyEvent(), FakeReadyEvent(ready=True)
    send_queue.add(item(urgent, 0, 1, early))
    send_queue.add(item(transfer, 0, 1, late))
    assert not send_queue.post(0.0)
    assert late.num_queries == 0
    early.ready = True
    send_queue.post(0.0)
    assert posted(link) == [1, 0]


@dataclass
class FakeStaging:
    """Lends one page at a time."""

    lent: list[PageId] = field(default_factory=list)

    def stage(self, pages: Sequence[object], num_held: int) -> list[PageId] | None:
        assert num_held == len(self.lent)
        if self.lent:
            return None
        self.lent = [PageId(7)]
        return [PageId(7)]

    def release(self, pages: Sequence[PageId]) -> None:
        assert self.lent == list(pages)
        self.lent = []


@pytest.mark.parametrize("ends_by", ["success", "failure", "refusal", "closing"])
def test_a_staged_page_is_returned_however_its_push_ends(ends_by: str) -> None:
    send_queue, link, (transfer,) = make()
    staging = FakeStaging()
    send_queue.connect(link, staging)  # type: ignore[arg-type]
    send_queue.add(item(transfer, 0, 1))
    if ends_by == "refusal":
        link.refused = transfer.key
    send_queue.post(0.0)
    if ends_by != "refusal":
        assert staging.lent == [7]
        (_, push) = link.posted[0]
        push.ended, push.error = ends_by == "success", TransferError("lost") if ends_by == "failure" else None
        send_queue.reap(0.0)
    if ends_by == "closing":
        send_queue.fail(TransferError("closed"))
    assert staging.lent == []


def test_a_dead_link_ends_everything() -> None:
    send_queue, link, transfers = make(2)
    for transfer in transfers:
        send_queue.add(item(transfer, 0, 1))
    send_queue.post(0.0)
    send_queue.add(item(transfers[0], 1, 1))
    link.dead = TransferError("peer is gone")
    with pytest.raises(TransferError, match="peer is gone"):
        send_queue.post(0.0)
    send_queue.fail(link.dead)
    assert send_queue.pop_over() == transfers
    assert not send_queue.busy
    assert not send_queue.waits_for_polling


def test_a_stall_needs_a_write_in_flight() -> None:
    send_queue, link, (transfer,) = make()
    assert not send_queue.stalled(1e9, 5.0)
    send_queue.add(item(transfer, 0, 1))
    send_queue.post(100.0)
    assert not send_queue.stalled(104.0, 5.0)
    assert send_queue.stalled(105.1, 5.0)
    link.posted[0][1].ended = True
    send_queue.reap(106.0)
    assert not send_queue.stalled(1e9, 5.0)


def test_writes_that_end_at_once_make_room_for_the_next() -> None:
    """A write that ends while it is posted wakes no thread, so posting must continue until nothing more can start."""
    send_queue, link, (transfer,) = make()
    limit = MAX_INFLIGHT_BYTES // PAGE_BYTES
    send_queue.add(item(transfer, 0, 3 * limit))
    rounds = 0
    while send_queue.post(0.0):
        rounds += 1
        for _, push in link.posted:
            push.ended = True
        send_queue.reap(0.0)
    assert rounds == 3
    assert sum(arrival.num_pages for arrival, _ in link.posted) == 3 * limit
    assert not send_queue.post(0.0)
