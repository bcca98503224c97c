"""The decode worker's end of KV transfers: which pages may be written, what has landed, which peer is lost.

Between the decode worker's loop, which opens and closes transfers, and the wires. Owns the table of open transfers;
never touches the page pool's bookkeeping, so it fences nothing itself: the caller fences pages before `open` and lifts
the fence when `close` has returned *and* the sender has said that it is over, or is known dead (see session.py).

One thread: asleep while nothing is open, and on wires that must be polled it polls only while pages are missing or a
peer is about to connect. Wires land pages from threads of their own. One lock guards what all of them share: the open
transfers (open_transfers.py), the peers (peers.py), who waits for quiet (quiet.py) and the events for the thread.
Callbacks are called without it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.kv_layout import KVLayout
from kv_transfer import wires
from kv_transfer.handshake import Offer
from kv_transfer.open_transfers import Incoming, OpenTransfers
from kv_transfer.own_sockets import unread_bytes
from kv_transfer.pages import PageBuffer
from kv_transfer.peers import Peers
from kv_transfer.quiet import Quiet
from kv_transfer.reshard import WHOLE_PAGE, PageRows, page_rows
from kv_transfer.transport import Arrival, Peer, ReceivingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey, WorkerId

FASTEST_POLL_S = 0.00005  # just after an arrival
SLOWEST_POLL_S = 0.0002  # between a prefill's chunks; a write shows at the second poll (docs/lab-notes.md)
JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)

OnArrival = Callable[[TransferKey, int, int], None]
OnFailure = Callable[[TransferKey, TransferError], None]


@dataclass(slots=True)
class ReceiverStats:
    """Counters since the start."""

    num_pages: int = 0
    num_late_arrivals: int = 0  # of transfers that are not open, out of their range, or landed before: ignored
    num_lost_peers: int = 0
    num_failures: int = 0


class TransferReceiver:
    """Safe from any thread. Callbacks run on threads of the receiver's and its wires, and must not block."""

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        epoch: Epoch,
        config: TransferConfig,
        on_arrival: OnArrival,
        on_failure: OnFailure,
    ) -> None:
        self._pages = PageBuffer(pool)
        if self._pages.page_bytes != layout.page_bytes:
            raise ValueError(f"pool pages have {self._pages.page_bytes} bytes, the layout says {layout.page_bytes}")
        self._layout = layout
        self._epoch = epoch
        self._config = config
        self._on_arrival = on_arrival
        self._on_failure = on_failure
        self._lock = threading.Condition()
        self._open = OpenTransfers()
        self._peers = Peers()
        self._events: deque[Callable[[], None]] = deque()
        self._quiet = Quiet()
        self._has_polled_peers = False  # whether anybody ever wrote by a wire that must be polled
        self._stopping = False
        self.stats = ReceiverStats()
        self._wires: list[ReceivingTransport] = wires.receiving(self._pages, config, self)
        self._polled = [wire for wire in self._wires if wire.needs_polling]
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._thread.start()

    @property
    def transports(self) -> list[str]:
        return [wire.name for wire in self._wires]

    def offer(self, peer_worker_id: WorkerId, peer_epoch: Epoch, heads: range | None = None) -> bytes:
        """What that incarnation needs to push here, of each page only `heads` where given. A newer incarnation of a
        known worker replaces the old one."""
        peer = Peer(peer_worker_id, peer_epoch)
        with self._lock:
            replaced = self._peers.admit(peer, heads if heads != self._layout.heads else None)
            if self._polled:
                self._peers.expect(peer_epoch, time.monotonic() + self._config.connect_timeout_s)
                self._lock.notify()
        if replaced is not None:
            self.forget(replaced)
        details = tuple((wire.name, wire.offer(peer)) for wire in self._wires)
        share = self._peers.heads_of(peer_epoch)
        wanted = (share.start, share.stop) if share is not None else None
        return Offer(self._epoch, self._layout, self._pages.num_pages, details, wanted).encode()

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float | None = None) -> None:
        """From now on the transfer may write `pages`; index i of an arrival is pages[i]. They are fenced already.

        Fails when no page comes for `timeout_s`, the configured time-out unless told; `math.inf` where the caller knows
        better whether the sender is still at it."""
        if key.receiver_epoch != self._epoch:
            raise TransferError(
                f"transfer {key.transfer_id}: receiver epoch {key.receiver_epoch}, this is {self._epoch}"
            )
        now_s, bound_s = time.monotonic(), self._config.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._open.open(key, pages, bound_s, now_s)
            self._lock.notify()

    def close(self, key: TransferKey) -> None:
        """No callback of it starts after this, and no emulated wire writes its pages. A one-sided wire still may,
        until the sender says that it is over. Blocks for a copy into its pages that runs right now; idempotent."""
        with self._lock:
            incoming = self._open.close(key)
        if incoming is not None:
            with incoming.writing:
                incoming.closed = True

    def when_quiet(self, then: Callable[[], None]) -> None:
        """Calls `then`, from any thread, once nothing is written any more of transfers whose senders are over.

        At once, but for wires on which our own polling writes what has come over a socket (UCX over TCP): what a sender
        had handed to its kernel may lie there still, though the sender has given up, or died. Then it is called when
        everything that has come was read, and nothing has come for a while since.
        """
        with self._lock:
            if self._has_polled_peers and not self._stopping:
                self._quiet.wait(then, time.monotonic())
                self._lock.notify()
                return
        self._guard(then)

    def forget(self, peer: Peer) -> None:
        """The incarnation is known to be dead: fails what it has open and drops its connections."""
        with self._lock:
            self._peers.forget(peer)
        for wire in self._wires:
            wire.forget(peer)
        self._fail_all(peer, TransferError(f"{peer.worker_id} (epoch {peer.epoch}) is gone"))

    def shutdown(self) -> None:
        """Closes every wire; callbacks stop. Blocks until the thread has ended, a few seconds at most."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        with self._lock:
            open_now = self._open.close_all()
        for incoming in open_now:
            with incoming.writing:
                incoming.closed = True
        for wire in self._wires:
            wire.close()

    # Landing: called by wires from threads of their own.

    def land(self, arrival: Arrival, staged: PageBuffer) -> bool:
        with self._lock:
            incoming = self._open.find(arrival)
        if incoming is None:
            self._ignore(arrival)
            return False
        with incoming.writing:
            if incoming.closed or incoming.failed:
                self._ignore(arrival)
                return False
            # A duplicate may come after the fence was lifted for pages that have all landed: it must write nothing.
            fresh = incoming.fresh(arrival)
            offsets = [PageId(index - arrival.first_index) for index in fresh]
            into = [incoming.pages[index] for index in fresh]
            self._pages.scatter_part(into, staged, offsets, self._rows_of(arrival.key.sender_epoch))
            self._pages.settle()  # the engine's stream may read them as soon as they are reported
            with self._lock:
                incoming.land(fresh, time.monotonic())
        if not fresh:
            self._ignore(arrival)
            return True
        self._guard(lambda: self._tell(arrival))
        return True

    def rows_of(self, peer: Peer) -> PageRows:
        return self._rows_of(peer.epoch)

    def _rows_of(self, sender_epoch: Epoch) -> PageRows:
        heads = self._peers.heads_of(sender_epoch)
        return WHOLE_PAGE if heads is None else page_rows(self._layout, heads)

    def landed(self, arrival: Arrival) -> None:
        self._guard(lambda: self._arrived(arrival))

    def lost(self, peer: Peer, error: TransferError) -> None:
        log.info("%s", error)  # the transfers it fails, if any, carry it
        with self._lock:
            self.stats.num_lost_peers += 1
        self._fail_all(peer, error)

    # The receiver's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._events and not self._stopping:
                    self._lock.wait(self._pause_s(time.monotonic()))
                if self._stopping:
                    return
                events, self._events = self._events, deque()
                polling = self._must_poll(time.monotonic())
            for event in events:
                self._guard(event)
            if polling:
                for wire in self._polled:
                    self._guard(lambda wire=wire: self._poll(wire))  # type: ignore[misc]
            self._fail_stalled(time.monotonic())
            self._look_for_quiet(time.monotonic())

    def _look_for_quiet(self, now_s: float) -> None:
        with self._lock:
            if not self._quiet.is_due(now_s):
                return
        nothing_unread = unread_bytes() == 0
        with self._lock:
            waited = self._quiet.look(nothing_unread, now_s)
        for then in waited:
            self._guard(then)

    def _must_poll(self, now_s: float) -> bool:
        if not self._polled:
            return False
        # Until the caller closes it, landed or failed: a sender cannot end its last push on a wire that nobody drives.
        return self._peers.any_expected(now_s) or len(self._open) > 0 or len(self._quiet) > 0

    def _pause_s(self, now_s: float) -> float | None:
        """How long the thread may sleep unless it is woken; None: for ever."""
        if not self._must_poll(now_s):
            next_s = self._open.next_due_s()
            return None if math.isinf(next_s) else max(0.0, next_s - now_s)
        last_s = self._open.last_progress_s()
        quiet_s = now_s - last_s if last_s is not None else SLOWEST_POLL_S * 8
        return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, quiet_s / 8))

    def _poll(self, wire: ReceivingTransport) -> None:
        arrivals = wire.poll()
        for epoch in wire.heard_from():
            with self._lock:
                self._has_polled_peers = True
                self._peers.has_come(epoch)
        for arrival in arrivals:
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        """Of pages that the peer has written by itself."""
        with self._lock:
            self._open.arrive(arrival, time.monotonic())
        self._tell(arrival)

    def _tell(self, arrival: Arrival) -> None:
        with self._lock:
            if known := self._open.find(arrival) is not None:
                self.stats.num_pages += arrival.num_pages
        if not known:
            self._ignore(arrival)
            return
        self._on_arrival(arrival.key, arrival.first_index, arrival.num_pages)

    def _fail_stalled(self, now_s: float) -> None:
        with self._lock:
            stalled = self._open.stalled(now_s)
        for item in stalled:
            message = f"no page for {item.timeout_s} s, {len(item.missing)} of {len(item.pages)} missing"
            self._fail(item, TransferError(f"transfer {item.key.transfer_id}: {message}"))

    def _fail_all(self, peer: Peer, error: TransferError) -> None:
        with self._lock:
            found = self._open.waiting_for(peer.epoch)
        for incoming in found:
            self._post(lambda incoming=incoming: self._fail(incoming, error))  # type: ignore[misc]

    def _fail(self, incoming: Incoming, error: TransferError) -> None:
        """Once a transfer; it stays known until the caller closes it, and nothing is written any more."""
        with self._lock:
            if not self._open.fail(incoming):
                return
        self.stats.num_failures += 1
        self._guard(lambda: self._on_failure(incoming.key, error))

    def _post(self, event: Callable[[], None]) -> None:
        with self._lock:
            self._events.append(event)
            self._lock.notify()

    def _guard(self, event: Callable[[], None]) -> None:
        """A fault in one event or callback must not end the thread that serves every transfer."""
        try:
            event()
        except Exception:
            log.exception("handling a transfer event failed")

    def _ignore(self, arrival: Arrival) -> None:
        with self._lock:
            self.stats.num_late_arrivals += 1
        log.debug("ignored %s: not open, or outside its pages", arrival)
