"""Defines what a transport between two page pools implements, so that sender and receiver know no transport by name.

The sender's thread drives one `TransportLink` per receiver incarnation. The receiver learns what landed in one of two
ways: by `PolledTransport.poll`, if the peer writes into the pool on its own and UCX reports it; or through the
`Landing` that it gives to transports with threads of their own, which announce pages, or stage them and copy them in.
No state, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import PageRows
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferId, TransferKey, WorkerId

# The most bytes that one push moves, unless a link takes more. It bounds staging buffers, and the call that posts a
# write.
MAX_PUSH_BYTES = 8 << 20

Details = Mapping[str, object]  # one transport's part of an offer; msgpack can encode it


class Peer(NamedTuple):
    """An incarnation of the worker at the other end."""

    worker_id: WorkerId
    epoch: Epoch


class Arrival(NamedTuple):
    """Says that `num_pages` destination pages of a transfer, from index `first_index` on, are in the pool."""

    key: TransferKey
    first_index: int
    num_pages: int


def notice(arrival: Arrival) -> list[object]:
    """Returns an arrival as plain data, for a notification or a header."""
    key = arrival.key
    return [key.transfer_id, key.sender_epoch, key.receiver_epoch, arrival.first_index, arrival.num_pages]


def parse_notice(data: object) -> Arrival:
    """Returns the arrival in a decoded notification. Raises TransferError, because it came over a network."""
    match data:
        case [str(name), int(sender), int(receiver), int(first), int(count)]:
            if min(sender, receiver, first) >= 0 and count > 0:
                return Arrival(TransferKey(TransferId(name), Epoch(sender), Epoch(receiver)), first, count)
    raise TransferError(f"notice {str(data)[:120]}: want [transfer id, sender epoch, receiver epoch, first, count]")


class LayerGroup(NamedTuple):
    """The `number`-th of `of` equal groups of a page's layers: one run of its bytes, as pages are contiguous across
    layers."""

    number: int
    of: int

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.of


ALL_LAYERS = LayerGroup(0, 1)


class Landing(Protocol):
    """The part of the receiver that transports with their own threads use: it lands pages and learns of lost peers.
    Safe from any thread.
    """

    def land(self, arrival: Arrival, staged: PageBuffer, rows: PageRows) -> bool:
        """Copies staged pages, which hold only `rows`, into the pool if the transfer is open and has such pages.
        Returns whether the pool has them. A page that has landed before is not written again. Raises TransferError for
        staged pages of another size.
        """

    def landed(self, arrival: Arrival) -> None:
        """Reports pages that the peer has written on its own."""

    def rows_of(self, peer: Peer) -> PageRows:
        """Returns which rows of each page this peer pushes, which never changes. Raises TransferError for a peer that
        was forgotten."""

    def lost(self, peer: Peer, error: TransferError) -> None:
        """Fails the transfers that a peer has open, because its connection broke."""


class ReceivingTransport(Protocol):
    """The receiving side of one transport, for all peers."""

    name: str
    is_one_sided: bool  # whether a connected peer writes into the pool on its own

    def offer(self, peer: Peer) -> Details:
        """Returns what the peer needs to connect. Cheap and repeatable; never blocks."""

    def forget(self, peer: Peer) -> None:
        """Ends the connections of an incarnation, and ignores what it still sends. Never blocks."""

    def cut_off(self, epoch: Epoch) -> bool:
        """No longer lets the incarnation connect, unless it gets another offer. Returns whether it cannot write into
        the pool on its own. Never blocks.
        """

    def tear_down(self) -> None:
        """Withdraws the pool's memory, so that no peer can write on its own; live peers reconnect. Blocks. Does nothing
        where `cut_off` suffices. If it raises TransferError, nothing has changed.
        """

    def close(self) -> None: ...


@runtime_checkable
class PolledTransport(ReceivingTransport, Protocol):
    """A transport that reports arrivals only when it is polled."""

    stray_s: float  # how long bytes of a finished sender may still arrive while `poll` is called

    def poll(self) -> list[Arrival]:
        """Returns arrivals since the last call, unchecked. Only the receiver's thread calls it; never blocks."""

    def heard_from(self) -> frozenset[Epoch]:
        """Returns the epochs of peers that have connected since the last call."""


class PushHandle(Protocol):
    """A push in flight."""

    def done(self) -> bool:
        """Returns whether every page is in the peer's pool. Never blocks. Raises TransferError if that will never
        happen.
        """


class TransportLink(Protocol):
    """A connection to one receiver incarnation, driven by the sender's thread."""

    needs_polling: (
        bool  # whether pushes end only while `PushHandle.done` is called; other links call the sender's `wake`
    )
    max_push_bytes: int
    takes_layer_groups: bool  # whether it takes them; it must then push in order, as the last group announces the pages
    gains_from_layer_groups: bool  # whether to use them unless configured otherwise

    def push(
        self,
        arrival: Arrival,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> PushHandle:
        """Starts to move pages, or a group of their layers, that are complete in memory. Blocks at most for a small
        copy. Raises TransferError.
        """

    def check(self) -> None:
        """Raises TransferError once the link is known to be dead. Never blocks."""

    def close(self) -> None:
        """Ends pushes in flight. Once it has returned, this link writes and reads nothing more."""


class SendingTransport(Protocol):
    """The sending side of one transport."""

    name: str

    def suits(self, details: Details) -> bool:
        """Returns whether this transport can reach the receiver at all. Cheap; never blocks."""

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> TransportLink:
        """Connects to a receiver; `num_rows` rows of this end's buffer make one of its pages. Blocks for at most
        connect_timeout_s. Raises TransferError. Any threads may call it at the same time."""

    def close(self) -> None: ...
