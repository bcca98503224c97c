"""Which incarnations a receiver's pool was offered to: the newest of each worker, its share of the heads, who may come.

Pure: no I/O, no thread, no clock but the `now_s` that is passed in. The receiver (receiver.py) owns it, and guards it
with its lock. Epochs are nanoseconds, so that an epoch alone names an incarnation.
"""

from __future__ import annotations

from kv_transfer.transport import Peer
from penstock.errors import TransferError
from penstock.types import Epoch, WorkerId


class Peers:
    """Guarded by the receiver's lock, but for `heads_of`: one look into a dict, by threads that land pages."""

    def __init__(self) -> None:
        self._newest: dict[WorkerId, Peer] = {}
        self._heads: dict[Epoch, range] = {}  # of those that have a share of our pages' heads
        self._awaited: dict[Epoch, float] = {}  # that may be connecting, and until when

    def admit(self, peer: Peer, heads: range | None) -> Peer | None:
        """From now on it may send, `heads` alone where given. Returns the incarnation whose place it takes, which is to
        be forgotten. Raises TransferError where a newer one has come."""
        known = self._newest.get(peer.worker_id)
        if known is not None and known.epoch > peer.epoch:
            raise TransferError(f"{peer.worker_id}: epoch {peer.epoch} is past, {known.epoch} has come since")
        self._newest[peer.worker_id] = peer
        if heads is not None:
            self._heads[peer.epoch] = heads
        return known if known != peer else None

    def forget(self, peer: Peer) -> None:
        self._awaited.pop(peer.epoch, None)
        self._heads.pop(peer.epoch, None)
        if self._newest.get(peer.worker_id) == peer:
            del self._newest[peer.worker_id]

    def heads_of(self, epoch: Epoch) -> range | None:
        """None: all that a page has."""
        return self._heads.get(epoch)

    def expect(self, epoch: Epoch, until_s: float) -> None:
        """It may be connecting until then."""
        self._awaited[epoch] = until_s

    def has_come(self, epoch: Epoch) -> None:
        self._awaited.pop(epoch, None)

    def any_expected(self, now_s: float) -> bool:
        self._awaited = {epoch: until_s for epoch, until_s in self._awaited.items() if until_s > now_s}
        return bool(self._awaited)
