"""Keeps the incarnations to which a receiver's pool was offered, their shares of the heads, and which may still
connect.

Pure: no I/O, no thread, no clock except the `now_s` passed in. The receiver (receiver.py) owns the tables and guards
them with its lock. Incarnations are known only by their epochs, which have no order: of two incarnations of a worker,
the later one is the one that receives further offers.
"""

from __future__ import annotations

from collections import OrderedDict

from kv_transfer.transports.transport import Peer
from penstock.errors import TransferError
from penstock.types import Epoch, WorkerId

MAX_INCARNATIONS = 4  # known per worker at a time; routers may briefly name an earlier one
MAX_CUT_OFF = 4096  # most epochs remembered as cut off


class Incarnations:
    """Keeps the incarnations of each worker that received the most recent offers."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, OrderedDict[Epoch, None]] = {}
        self._worker_of: dict[Epoch, WorkerId] = {}

    def __len__(self) -> int:
        return len(self._worker_of)

    def admit(self, peer: Peer) -> Peer | None:
        """Adds an incarnation, or records a further offer to it. Returns the one that is displaced, if any."""
        known = self._by_worker.setdefault(peer.worker_id, OrderedDict())
        known[peer.epoch] = None
        known.move_to_end(peer.epoch)
        self._worker_of[peer.epoch] = peer.worker_id
        return Peer(peer.worker_id, next(iter(known))) if len(known) > MAX_INCARNATIONS else None

    def find(self, epoch: Epoch) -> Peer | None:
        worker_id = self._worker_of.get(epoch)
        return Peer(worker_id, epoch) if worker_id is not None else None

    def forget(self, epoch: Epoch) -> None:
        worker_id = self._worker_of.pop(epoch, None)
        if worker_id is not None:
            del self._by_worker[worker_id][epoch]
            if not self._by_worker[worker_id]:
                del self._by_worker[worker_id]


class KnownPeers:
    """The peers of a receiver. Guarded by the receiver's lock."""

    def __init__(self) -> None:
        self._incarnations = Incarnations()
        self._heads: dict[Epoch, range | None] = {}  # heads that a peer sends; None: all heads of our pages
        self._awaited: dict[Epoch, float] = {}  # until when peers may be connecting
        self._announcing: set[Epoch] = set()  # peers whose pages are reported without polling
        self._cut_off: OrderedDict[Epoch, None] = OrderedDict()  # ordered by time of the cut

    def admit(self, peer: Peer, heads: range | None) -> Peer | None:
        """Lets a peer send, but only `heads` if given. Returns the displaced incarnation, which the caller must forget.
        Raises TransferError for a peer that sends other heads than before.
        """
        known = self._heads.setdefault(peer.epoch, heads)
        if known != heads:
            raise TransferError(f"{peer.worker_id}: epoch {peer.epoch} sends heads {known}, it cannot send {heads} too")
        return self._incarnations.admit(peer)

    def find(self, epoch: Epoch) -> Peer | None:
        return self._incarnations.find(epoch)

    def forget(self, peer: Peer) -> None:
        self._awaited.pop(peer.epoch, None)
        self._announcing.discard(peer.epoch)
        self._heads.pop(peer.epoch, None)
        self._incarnations.forget(peer.epoch)

    def heads_of(self, epoch: Epoch) -> range | None:
        """Returns the heads that the peer sends; None if it sends whole pages. Raises TransferError for an unknown or
        forgotten peer.
        """
        try:
            return self._heads[epoch]
        except KeyError:
            raise TransferError(f"epoch {epoch} is not known here, or was forgotten") from None

    def cut_off(self, epoch: Epoch) -> None:
        """Records that the peer may not connect over one-sided transports again."""
        self._cut_off[epoch] = None
        if len(self._cut_off) > MAX_CUT_OFF:
            self._cut_off.popitem(last=False)

    def is_cut_off(self, epoch: Epoch) -> bool:
        return epoch in self._cut_off

    def expect(self, epoch: Epoch, until_s: float) -> None:
        """Expects the peer to connect by `until_s`, unless it has connected over a transport that needs no polling."""
        if epoch not in self._announcing:
            self._awaited[epoch] = until_s

    def has_come(self, epoch: Epoch) -> None:
        """Stops expecting a peer that has connected."""
        self._awaited.pop(epoch, None)

    def announces(self, epoch: Epoch) -> bool:
        """Returns whether the peer's pages are known to be reported without polling."""
        return epoch in self._announcing

    def has_announced(self, epoch: Epoch) -> None:
        """Records that the peer's pages are reported without polling from now on."""
        if epoch in self._heads:
            self._awaited.pop(epoch, None)
            self._announcing.add(epoch)

    def has_left(self, epoch: Epoch, until_s: float) -> None:
        """Records the end of a peer's connection. Until `until_s` it may reconnect over any transport."""
        self._announcing.discard(epoch)
        if epoch in self._heads:
            self._awaited[epoch] = until_s

    def any_expected(self, now_s: float) -> bool:
        """Returns whether any peer may still be connecting."""
        self._awaited = {epoch: until_s for epoch, until_s in self._awaited.items() if until_s > now_s}
        return bool(self._awaited)
