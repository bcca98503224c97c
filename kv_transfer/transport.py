"""What a wire between two page pools must offer, so that the sender and the receiver know nothing of any wire.

A transfer's pages go from a prefill worker's pool to a decode worker's. The sender's thread drives a `Link` per
receiver incarnation; the receiver is told of what landed, either by `poll` (one-sided wires, whose peer writes into
the pool by itself) or by the `Landing` that it hands to wires which stage the bytes and copy them in (emulated
wires). Protocols only: no state, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kv_transfer.pages import PageBuffer
from kv_transfer.reshard import PageRows
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferId, TransferKey, WorkerId

# Of one push, unless a link takes more: bounds staging buffers, and the call that posts a one-sided write.
MAX_PUSH_BYTES = 8 << 20

Details = Mapping[str, object]  # one wire's part of an offer: msgpack-able


class Peer(NamedTuple):
    """One incarnation of the worker at the other end."""

    worker_id: WorkerId
    epoch: Epoch


class Arrival(NamedTuple):
    """`num_pages` of a transfer, from the `first_index`-th of its destination pages on, are in the pool."""

    key: TransferKey
    first_index: int
    num_pages: int


def notice(arrival: Arrival) -> list[object]:
    """An arrival as plain data, for a notification or a header."""
    key = arrival.key
    return [key.transfer_id, key.sender_epoch, key.receiver_epoch, arrival.first_index, arrival.num_pages]


def parse_notice(data: object) -> Arrival:
    """The arrival in a decoded notification. Raises TransferError: it came over a network."""
    match data:
        case [str(name), int(sender), int(receiver), int(first), int(count)]:
            if min(sender, receiver, first) >= 0 and count > 0:
                return Arrival(TransferKey(TransferId(name), Epoch(sender), Epoch(receiver)), first, count)
    raise TransferError(f"notice {str(data)[:120]}: want [transfer id, sender epoch, receiver epoch, first, count]")


class Part(NamedTuple):
    """The `number`-th of `of` equal runs of every page: as a page is contiguous across layers, some of its layers."""

    number: int
    of: int

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.of


WHOLE = Part(0, 1)


class Landing(Protocol):
    """Where a wire with threads of its own brings or announces pages, and reports lost peers. Safe from any thread."""

    def land(self, arrival: Arrival, staged: PageBuffer) -> bool:
        """Copies staged pages into the pool if the transfer is open and names such pages; says whether they are there.
        A page that has landed before is not written again."""

    def landed(self, arrival: Arrival) -> None:
        """The peer has written these pages by itself."""

    def rows_of(self, peer: Peer) -> PageRows:
        """What each page of a push of this peer's is made of."""

    def lost(self, peer: Peer, error: TransferError) -> None:
        """The peer's wire broke: fails what it still has open."""


class ReceivingTransport(Protocol):
    """The decode worker's side of one wire, for every peer."""

    name: str
    needs_polling: bool  # whether arrivals show only when `poll` is called

    def offer(self, peer: Peer) -> Details:
        """What the peer needs to connect. Cheap and repeatable; never blocks."""

    def poll(self) -> list[Arrival]:
        """Arrivals since the last call, unchecked. Called by the receiver's thread alone; never blocks."""

    def heard_from(self) -> frozenset[Epoch]:
        """Epochs of peers that have connected since the last call (polled wires; others: none)."""

    def forget(self, peer: Peer) -> None:
        """The incarnation is gone: what it held here is dropped, what it still says is ignored. Never blocks."""

    def close(self) -> None: ...


class Push(Protocol):
    """Pages under way."""

    def done(self) -> bool:
        """Whether every page is in the peer's pool. Never blocks. Raises TransferError when it never will be."""


class Link(Protocol):
    """A connection to one receiver incarnation. Driven by the sender's thread."""

    needs_polling: bool  # whether a push ends only while `Push.done` is called; others call the sender's `wake`
    max_push_bytes: int
    takes_parts: bool  # of pages. Needs pushes that are made in order: the last part announces the pages
    gains_from_parts: bool  # by the wire's own reckoning, where nobody has configured it

    def push(
        self, arrival: Arrival, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> Push:
        """Starts to move pages, or a part of each, that are complete in memory. Blocks for a small copy at most. Raises
        TransferError."""

    def check(self) -> None:
        """Raises TransferError once the link is known to be dead. Never blocks."""

    def close(self) -> None:
        """Ends what is under way: after it, nothing of this link is written or read any more."""


class SendingTransport(Protocol):
    """The prefill worker's side of one wire."""

    name: str

    def suits(self, details: Details) -> bool:
        """Whether this wire can reach that receiver at all. Cheap; never blocks."""

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> Link:
        """`num_rows`: how many pages of this end's buffer make one of the receiver's. Blocks, at most
        connect_timeout_s. Raises TransferError. Called from any thread, also at the same time."""

    def close(self) -> None: ...
