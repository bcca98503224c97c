"""What a sender owes one receiver: order, bounds, gates, and each transfer's end exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kv_transfer.outbox import HANDICAP_BYTES, MAX_BULK_BYTES, MAX_INFLIGHT_BYTES, Item, Outbox, Outgoing
from kv_transfer.transport import MAX_PUSH_BYTES, WHOLE, Arrival, Part
from penstock.errors import TransferError
from penstock.types import Lane, PageId
from tests.transfer_pair import key

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
    takes_parts: bool = False
    gains_from_parts: bool = False
    posted: list[tuple[Arrival, FakePush]] = field(default_factory=list)
    dead: TransferError | None = None

    def push(
        self, arrival: Arrival, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> FakePush:
        self.check()
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
class Gate:
    ready: bool = False

    def query(self) -> bool:
        return self.ready


def make(num_transfers: int = 1) -> tuple[Outbox, FakeLink, list[Outgoing]]:
    link = FakeLink()
    outbox = Outbox(PAGE_BYTES, link)
    transfers = [Outgoing(key(number)) for number in range(num_transfers)]
    outbox.transfers = {transfer.key: transfer for transfer in transfers}
    return outbox, link, transfers


def item(transfer: Outgoing, first: int, count: int, gate: Gate | None = None) -> Item:
    numbers = [PageId(page) for page in range(first, first + count)]
    return Item(transfer, first, numbers, numbers, gate)


def test_a_large_push_goes_in_parts_and_within_bounds() -> None:
    outbox, link, (transfer,) = make()
    step, limit = MAX_PUSH_BYTES // PAGE_BYTES, MAX_INFLIGHT_BYTES // PAGE_BYTES
    outbox.add(item(transfer, 0, 3 * limit))
    outbox.post(0.0)
    assert [(arrival.first_index, arrival.num_pages) for arrival, _ in link.posted[:2]] == [(0, step), (step, step)]
    assert len(link.posted) * step == limit
    transfer.finishing = True
    while not transfer.over:
        for _, push in link.posted:
            push.ended = True
        outbox.reap(1.0)
        outbox.post(1.0)
        assert sum(not push.ended for _, push in link.posted) * step <= limit
    assert [arrival.first_index for arrival, _ in link.posted] == list(range(0, 3 * limit, step))
    assert outbox.num_pages_sent == 3 * limit
    assert outbox.take_over() == [transfer]
    assert outbox.take_over() == []


def posted(link: FakeLink) -> list[int]:
    """Numbers of the transfers, in the order of their pushes."""
    return [int(arrival.key.transfer_id[1:]) for arrival, _ in link.posted]


def drain(outbox: Outbox, link: FakeLink, now_s: float = 0.0) -> None:
    """Every write is over when it is posted."""
    while outbox.post(now_s):
        for _, push in link.posted:
            push.ended = True
        outbox.reap(now_s)


def test_interactive_pages_go_first_and_bulk_last() -> None:
    outbox, link, (bulk, standard, interactive) = make(3)
    bulk.lane, interactive.lane = Lane.BULK, Lane.INTERACTIVE
    for transfer in (bulk, standard, interactive):
        outbox.add(item(transfer, 0, 12))  # two parts each
    drain(outbox, link)
    assert posted(link) == [2, 2, 1, 1, 0, 0]
    assert [arrival.first_index for arrival, _ in link.posted] == [0, 8] * 3


def test_bulk_leaves_the_link_to_others_soon() -> None:
    outbox, link, (bulk, interactive) = make(2)
    bulk.lane, interactive.lane = Lane.BULK, Lane.INTERACTIVE
    outbox.add(item(bulk, 0, 200))
    outbox.post(0.0)
    assert len(link.posted) * MAX_PUSH_BYTES == MAX_BULK_BYTES
    outbox.add(item(interactive, 0, 200))
    outbox.post(0.0)
    assert posted(link)[2:] == [1] * (len(link.posted) - 2)
    assert len(link.posted) * MAX_PUSH_BYTES == MAX_INFLIGHT_BYTES


def test_a_lane_that_is_overtaken_gets_its_turn() -> None:
    """More interactive pages than the link takes, all the time: a standard page waits for its handicap, no longer."""
    outbox, link, (standard, interactive) = make(2)
    interactive.lane = Lane.INTERACTIVE
    window = MAX_INFLIGHT_BYTES // PAGE_BYTES
    outbox.add(item(standard, 0, 1))
    for rounds in range(100):
        outbox.add(item(interactive, rounds * 2 * window, 2 * window))
        outbox.post(0.0)
        for _, push in link.posted:
            push.ended = True
        outbox.reap(0.0)
        if 0 in posted(link):
            break
    assert HANDICAP_BYTES[Lane.STANDARD] <= rounds * MAX_INFLIGHT_BYTES <= HANDICAP_BYTES[Lane.STANDARD] * 2


def test_pages_that_are_ready_do_not_wait_for_more_urgent_ones_that_are_not() -> None:
    outbox, link, (standard, interactive) = make(2)
    interactive.lane = Lane.INTERACTIVE
    gates = [Gate(), Gate(), Gate()]
    for transfer, first, gate in ((standard, 0, gates[0]), (interactive, 0, gates[1]), (standard, 1, gates[2])):
        outbox.add(item(transfer, first, 1, gate))
    gates[0].ready = True
    outbox.post(0.0)
    assert posted(link) == [0]
    assert outbox.waits_for_polling
    for gate in gates:
        gate.ready = True
    outbox.post(0.0)
    assert posted(link) == [0, 1, 0]


def test_a_push_waits_until_its_pages_are_computed() -> None:
    outbox, link, (transfer,) = make()
    gate = Gate()
    outbox.add(item(transfer, 0, 1, gate))
    outbox.post(0.0)
    assert link.posted == []
    assert outbox.waits_for_polling
    gate.ready = True
    outbox.post(0.0)
    assert len(link.posted) == 1


def test_an_aborted_transfer_ends_when_what_is_under_way_has_ended() -> None:
    outbox, link, (aborted, other) = make(2)
    outbox.add(item(aborted, 0, 1))
    outbox.post(0.0)
    outbox.add(item(aborted, 1, 1))
    outbox.add(item(other, 0, 1))
    aborted.aborted = True
    outbox.post(0.0)
    assert [arrival.key for arrival, _ in link.posted] == [aborted.key, other.key]
    assert outbox.take_over() == []
    link.posted[0][1].ended = True
    outbox.reap(0.0)
    assert outbox.take_over() == [aborted]


def test_a_failed_push_fails_its_transfer_alone() -> None:
    outbox, link, (failing, other) = make(2)
    for transfer in (failing, other):
        outbox.add(item(transfer, 0, 1))
    outbox.post(0.0)
    link.posted[0][1].error = TransferError("the receiver has closed it")
    link.posted[1][1].ended = other.finishing = True
    outbox.reap(0.0)
    assert outbox.take_over() == [failing, other]
    assert failing.error is not None
    assert other.error is None


def test_a_dead_link_ends_everything() -> None:
    outbox, link, transfers = make(2)
    for transfer in transfers:
        outbox.add(item(transfer, 0, 1))
    outbox.post(0.0)
    outbox.add(item(transfers[0], 1, 1))
    link.dead = TransferError("peer is gone")
    with pytest.raises(TransferError, match="peer is gone"):
        outbox.post(0.0)
    outbox.fail(link.dead)
    assert outbox.take_over() == transfers
    assert not outbox.busy
    assert not outbox.waits_for_polling


def test_only_silence_while_something_is_under_way_is_a_stall() -> None:
    outbox, link, (transfer,) = make()
    assert not outbox.stalled(1e9, 5.0)
    outbox.add(item(transfer, 0, 1))
    outbox.post(100.0)
    assert not outbox.stalled(104.0, 5.0)
    assert outbox.stalled(105.1, 5.0)
    link.posted[0][1].ended = True
    outbox.reap(106.0)
    assert not outbox.stalled(1e9, 5.0)


def test_room_that_quick_writes_leave_is_used_at_once() -> None:
    """Writes that are over when they are posted wake nobody: whoever posts goes on until nothing more can start."""
    outbox, link, (transfer,) = make()
    limit = MAX_INFLIGHT_BYTES // PAGE_BYTES
    outbox.add(item(transfer, 0, 3 * limit))
    rounds = 0
    while outbox.post(0.0):
        rounds += 1
        for _, push in link.posted:
            push.ended = True
        outbox.reap(0.0)
    assert rounds == 3
    assert sum(arrival.num_pages for arrival, _ in link.posted) == 3 * limit
    assert not outbox.post(0.0)
