"""The receiving end of KV transfers: decides which pages may be written, and reports what has landed and which peers
are lost.

It sits between a worker's loop, which opens and closes transfers, and the transports, and it owns the table of open
transfers. It never touches the page pool's bookkeeping and so fences nothing: the caller fences pages before `open`,
and lifts the fence when `close` has returned *and* the sender has reported that it is done, or is known to be dead
(session/transfer_session.py).

It has one thread, which sleeps while nothing is open. The thread polls transports that need it only while transfers are
open, a peer is about to connect, or fences wait for stray writes. Transports land pages from their own threads. One
lock guards what all threads share: the open transfers (arrival_table.py), the peers (known_peers.py), the waiting
fences, and the events for the thread. Callbacks run without the lock.
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

from engine.cache.kv_layout import KVLayout
from kv_transfer.guarded import guarded
from kv_transfer.layout.checksum import row_checksums
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import WHOLE_PAGE, PageRows, page_rows
from kv_transfer.receive.arrival_table import ArrivalTable, TransferArrivals
from kv_transfer.receive.known_peers import KnownPeers
from kv_transfer.session.handshake import Offer, check_receiver
from kv_transfer.transports import registry
from kv_transfer.transports.transport import Arrival, Peer, PolledTransport, ReceivingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey, WorkerId

FASTEST_POLL_S = 0.00005  # pause just after an arrival
SLOWEST_POLL_S = 0.0002  # pause between chunks; the second poll shows a write (docs/lab-notes/)
JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)

OnArrival = Callable[[TransferKey, int, int], None]
OnFailure = Callable[[TransferKey, TransferError], None]


@dataclass(slots=True)
class ReceiverStats:
    """Counters since the start."""

    num_pages: int = 0
    num_late_arrivals: int = 0  # ignored arrivals: not open, out of range, or landed before
    num_lost_peers: int = 0
    num_failures: int = 0


class TransferReceiver:
    """Receives one rank's transfers. Thread-safe. Callbacks run on threads of the receiver and its transports, and must
    not block.
    """

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
        self._open = ArrivalTable()
        self._peers = KnownPeers()
        self._events: deque[Callable[[], None]] = deque()
        self._settling: list[tuple[float, Callable[[], None]]] = []  # (due_s, callback) of `after_stray_writes`
        self._stopping = False
        self.stats = ReceiverStats()
        self._transports: list[ReceivingTransport] = registry.receiving_transports(self._pages, config, self)
        self._polled = [transport for transport in self._transports if isinstance(transport, PolledTransport)]
        self._stray_s = max((transport.stray_s for transport in self._polled), default=0.0)
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._thread.start()

    @property
    def transports(self) -> list[str]:
        return [transport.name for transport in self._transports]

    def offer(self, peer_worker_id: WorkerId, peer_epoch: Epoch, heads: range | None = None) -> bytes:
        """Returns what an incarnation needs to push here. If `heads` is given, it may send only those of each page. Of
        each worker, only the incarnations with the most recent offers stay known. Raises TransferError.
        """
        peer = Peer(peer_worker_id, peer_epoch)
        share = heads if heads != self._layout.heads else None
        with self._lock:
            surplus = self._peers.admit(peer, share)
            cut_off = self._peers.is_cut_off(peer_epoch)
            # Under the lock, so that no offer bypasses `cut_off`.
            details = tuple(
                (transport.name, transport.offer(peer))
                for transport in self._transports
                if not (cut_off and transport.is_one_sided)
            )
            if self._polled:
                self._peers.expect(peer_epoch, time.monotonic() + self._config.connect_timeout_s)
                self._lock.notify()
        if surplus is not None:
            self.forget(surplus.epoch)
        if not details:
            raise TransferError(
                f"{peer_worker_id} (epoch {peer_epoch}) was silent and is cut off; only transport torch can reach this "
                f"worker again, and transfer.transport is {self._config.transport!r}; restart {peer_worker_id}"
            )
        wanted = (share.start, share.stop) if share is not None else None
        return Offer(self._epoch, self._layout, self._pages.num_pages, details, wanted).encode()

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float | None = None) -> None:
        """Lets the transfer write `pages`, which the caller has fenced; index i of an arrival means pages[i].

        The transfer fails when no page comes for `timeout_s`, by default the configured time-out; pass `math.inf` if
        the caller watches the sender itself. Raises TransferError for another epoch or an open key.
        """
        check_receiver(key, self._epoch)
        now_s, bound_s = time.monotonic(), self._config.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._open.open(key, pages, bound_s, now_s)
            self._lock.notify()

    def close(self, key: TransferKey) -> None:
        """Ends the transfer's callbacks, and keeps staging transports from writing its pages. A peer that writes into
        the pool itself may continue until it reports that it is done. Blocks while a copy into the pages runs.
        Idempotent.
        """
        with self._lock:
            transfer = self._open.close(key)
        if transfer is not None:
            with transfer.writing:
                transfer.closed = True

    def after_stray_writes(self, then: Callable[[], None]) -> None:
        """Calls `then`, on any thread, once no write of a sender that has finished can still reach the pool.

        That is at once except over RDMA, where packets may still be in the fabric, and where this end's polling copies
        what has arrived if the NIC cannot reach device memory. In that case `then` is called after polling for the
        lifetime of a packet.
        """
        with self._lock:
            if self._stray_s and not self._stopping:
                self._settling.append((time.monotonic() + self._stray_s, then))
                self._lock.notify()
                return
        guarded(then)

    def checksums(self, pages: Sequence[PageId], heads: range) -> list[int]:
        """Returns the checksums of `heads` in some pages of the pool. Blocks."""
        return row_checksums(self._pages.tensor, pages, page_rows(self._layout, heads))

    def forget(self, epoch: Epoch) -> None:
        """Fails an incarnation's open transfers and ends its connections. The incarnation may still write; see
        `cut_off`.
        """
        with self._lock:
            peer = self._peers.find(epoch)
            if peer is None:
                return
            self._peers.forget(peer)
        for transport in self._transports:
            transport.forget(peer)
        self._fail_all(peer, TransferError(f"{peer.worker_id} (epoch {peer.epoch}) is gone"))

    def cut_off(self, epoch: Epoch) -> bool:
        """Refuses the incarnation further one-sided connections. Returns whether it has none left: then its transfers
        write nothing once they are closed here. It may still connect over two-sided transports.
        """
        with self._lock:
            self._peers.cut_off(epoch)
            answers = [transport.cut_off(epoch) for transport in self._transports]
        return all(answers)

    def tear_down(self, epoch: Epoch) -> bool:
        """Forgets an incarnation whose machine is known to be dead, and ends the connections that `cut_off` leaves
        open; over RDMA every peer must then reconnect. Returns what `cut_off` returns after that. Blocks. Raises
        TransferError if the memory cannot be withdrawn.
        """
        self.forget(epoch)
        self.cut_off(epoch)
        for transport in self._transports:
            if not transport.cut_off(epoch):
                transport.tear_down()
        return self.cut_off(epoch)

    def shutdown(self) -> None:
        """Closes every transport and stops callbacks. Blocks until the thread has ended, for at most a few seconds."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        with self._lock:
            open_now = self._open.close_all()
        for transfer in open_now:
            with transfer.writing:
                transfer.closed = True
        for transport in self._transports:
            transport.close()

    # `transport.Landing`: called by transports from their own threads.

    def land(self, arrival: Arrival, staged: PageBuffer, rows: PageRows) -> bool:
        part_bytes = self._pages.page_bytes // rows.num_in_page * rows.num_in_part
        if staged.page_bytes != part_bytes or staged.num_pages < arrival.num_pages:
            staging = f"{staged.num_pages} staged pages of {staged.page_bytes} bytes"
            raise TransferError(f"{staging}; want {arrival.num_pages} of {part_bytes}")
        with self._lock:
            transfer = self._open.find(arrival)
        if transfer is None:
            self._ignore(arrival)
            return False
        with transfer.writing:
            if transfer.closed or transfer.failed:
                self._ignore(arrival)
                return False
            # A duplicate may come after all pages have landed and the fence was lifted; it must write nothing.
            fresh = transfer.fresh(arrival)
            offsets = [PageId(index - arrival.first_index) for index in fresh]
            into = [transfer.pages[index] for index in fresh]
            self._pages.scatter(into, staged, offsets, rows)
            self._pages.settle()  # the engine's stream may read the pages as soon as they are reported
            with self._lock:
                transfer.land(fresh, time.monotonic())
                self._peers.has_announced(arrival.key.sender_epoch)
        if not fresh:
            self._ignore(arrival)
            return True
        guarded(lambda: self._report(arrival))
        return True

    def rows_of(self, peer: Peer) -> PageRows:
        with self._lock:
            heads = self._peers.heads_of(peer.epoch)
        return WHOLE_PAGE if heads is None else page_rows(self._layout, heads)

    def landed(self, arrival: Arrival) -> None:
        with self._lock:
            self._peers.has_announced(arrival.key.sender_epoch)
        guarded(lambda: self._arrived(arrival))

    def lost(self, peer: Peer, error: TransferError) -> None:
        log.info("%s", error)  # the failed transfers carry the error
        with self._lock:
            self.stats.num_lost_peers += 1
            if self._polled:
                self._peers.has_left(peer.epoch, time.monotonic() + self._config.connect_timeout_s)
                self._lock.notify()
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
                now_s = time.monotonic()
                polling = self._must_poll(now_s)
            for event in events:
                guarded(event)
            if polling:
                for transport in self._polled:
                    guarded(lambda transport=transport: self._poll(transport))  # type: ignore[misc]
            self._fail_stalled(time.monotonic())
            self._call_settled(now_s)

    def _call_settled(self, now_s: float) -> None:
        """Calls the callbacks that were due at `now_s`, before the last poll began."""
        with self._lock:
            due = [then for due_s, then in self._settling if due_s <= now_s]
            self._settling = [entry for entry in self._settling if entry[0] > now_s]
        for then in due:
            guarded(then)

    def _must_poll(self, now_s: float) -> bool:
        if not self._polled:
            return False
        # A transfer counts until the caller closes it, since a sender cannot finish its last push unless this end
        # polls. Transfers whose pages are reported without polling do not count.
        is_open = any(not self._peers.announces(epoch) for epoch in self._open.senders())
        return self._peers.any_expected(now_s) or is_open or bool(self._settling)

    def _pause_s(self, now_s: float) -> float | None:
        """Returns how long the thread may sleep unless it is woken; None means forever."""
        if not self._must_poll(now_s):
            next_s = self._open.next_due_s()
            return None if math.isinf(next_s) else max(0.0, next_s - now_s)
        last_s = self._open.last_progress_s()
        idle_s = now_s - last_s if last_s is not None else SLOWEST_POLL_S * 8
        return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, idle_s / 8))

    def _poll(self, transport: PolledTransport) -> None:
        arrivals = transport.poll()
        for epoch in transport.heard_from():
            with self._lock:
                self._peers.has_come(epoch)
        for arrival in arrivals:
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        """Records and reports pages that the peer has written on its own."""
        with self._lock:
            self._open.arrive(arrival, time.monotonic())
        self._report(arrival)

    def _report(self, arrival: Arrival) -> None:
        """Calls `on_arrival` unless the transfer has been closed."""
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
        for transfer in stalled:
            message = f"no page for {transfer.timeout_s} s, {len(transfer.missing)} of {len(transfer.pages)} missing"
            self._fail(transfer, TransferError(f"transfer {transfer.key.transfer_id}: {message}"))

    def _fail_all(self, peer: Peer, error: TransferError) -> None:
        with self._lock:
            found = self._open.waiting_for(peer.epoch)
        for transfer in found:
            self._post(lambda transfer=transfer: self._fail(transfer, error))  # type: ignore[misc]

    def _fail(self, transfer: TransferArrivals, error: TransferError) -> None:
        """Reports a failure once per transfer. The transfer stays open until the caller closes it, but no more pages
        are written.
        """
        with self._lock:
            if not self._open.fail(transfer):
                return
        self.stats.num_failures += 1
        guarded(lambda: self._on_failure(transfer.key, error))

    def _post(self, event: Callable[[], None]) -> None:
        with self._lock:
            self._events.append(event)
            self._lock.notify()

    def _ignore(self, arrival: Arrival) -> None:
        with self._lock:
            self.stats.num_late_arrivals += 1
        log.debug("ignored %s: not open, or outside its pages", arrival)
