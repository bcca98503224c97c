"""The incarnations that a receiver's pool was offered to, their shares of the heads, and which may still be connecting.

Pure: no I/O, no thread, no clock except the `now_s` passed in. The receiver (receiver.py) owns the tables and guards
them with its lock. An epoch alone names an incarnation, and epochs have no order: which of two incarnations of a worker
is the later one shows only by which is offered to from then on.
"""

from __future__ import annotations

from collections import OrderedDict

from kv_transfer.transports.transport import Peer
from penstock.errors import TransferError
from penstock.types import Epoch, WorkerId

MAX_INCARNATIONS = 4  # of one worker that are known at a time; routers may name an earlier one for a moment
MAX_CUT_OFF = 4096  # epochs that are remembered as cut off


class Incarnations:
    """The known incarnations of each worker, those offered to last."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, OrderedDict[Epoch, None]] = {}
        self._worker_of: dict[Epoch, WorkerId] = {}

    def __len__(self) -> int:
        return len(self._worker_of)

    def admit(self, peer: Peer) -> Peer | None:
        """Adds an incarnation, or notes that it is offered to again. Returns the one that had to give way, if any."""
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
    """Guarded by the receiver's lock."""

    def __init__(self) -> None:
        self._incarnations = Incarnations()
        self._heads: dict[Epoch, range | None] = {}  # that a peer sends; None: all heads in our pages
        self._awaited: dict[Epoch, float] = {}  # peers that may be connecting, and until when
        self._announcing: set[Epoch] = set()  # peers whose pages are reported without polling
        self._cut_off: OrderedDict[Epoch, None] = OrderedDict()  # in the order of their cutting

    def admit(self, peer: Peer, heads: range | None) -> Peer | None:
        """Lets a peer send, only `heads` if given. Returns the incarnation that gave way, which the caller must forget.
        Raises TransferError for a peer that sends other heads than before."""
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
        """Returns the heads that the peer sends; None if it sends all of a page. Raises TransferError for a peer that
        is not known, or not any more."""
        try:
            return self._heads[epoch]
        except KeyError:
            raise TransferError(f"epoch {epoch} is not known here, or was forgotten") from None

    def cut_off(self, epoch: Epoch) -> None:
        """Notes that the peer gets no way to write into the pool on its own any more."""
        self._cut_off[epoch] = None
        if len(self._cut_off) > MAX_CUT_OFF:
            self._cut_off.popitem(last=False)

    def is_cut_off(self, epoch: Epoch) -> bool:
        return epoch in self._cut_off

    def expect(self, epoch: Epoch, until_s: float) -> None:
        """Expects the peer to connect until then, unless it has come by a transport that needs no polling."""
        if epoch not in self._announcing:
            self._awaited[epoch] = until_s

    def has_come(self, epoch: Epoch) -> None:
        """Stops expecting a peer that has connected."""
        self._awaited.pop(epoch, None)

    def announces(self, epoch: Epoch) -> bool:
        """Returns whether the peer's pages are reported without polling, as far as is known."""
        return epoch in self._announcing

    def has_announced(self, epoch: Epoch) -> None:
        """Notes that pages of the peer were reported without polling; those that follow will be."""
        if epoch in self._heads:
            self._awaited.pop(epoch, None)
            self._announcing.add(epoch)

    def has_left(self, epoch: Epoch, until_s: float) -> None:
        """Notes the end of a peer's connection: until then it may come back by any transport."""
        self._announcing.discard(epoch)
        if epoch in self._heads:
            self._awaited[epoch] = until_s

    def any_expected(self, now_s: float) -> bool:
        """Returns whether any peer may still be connecting."""
        self._awaited = {epoch: until_s for epoch, until_s in self._awaited.items() if until_s > now_s}
        return bool(self._awaited)
