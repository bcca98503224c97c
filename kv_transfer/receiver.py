"""The decode worker's end of KV transfers: which pages may be written, what has landed, which peer is lost.

Between the decode worker's loop, which opens and closes transfers, and the wires. Owns the table of open transfers;
never touches the page pool's bookkeeping, so it fences nothing itself: the caller fences pages before `open` and lifts
the fence when `close` has returned *and* the sender has said that it is over, or is known dead (see session.py).

One thread: asleep while nothing is open, and on wires that must be polled it polls only while pages are missing or a
peer is about to connect.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.kv_layout import KVLayout
from kv_transfer import wires
from kv_transfer.handshake import Offer
from kv_transfer.own_sockets import unread_bytes
from kv_transfer.pages import PageBuffer, rows_of_pages
from kv_transfer.reshard import WHOLE_PAGE, PageRows, page_rows
from kv_transfer.transport import Arrival, Peer, ReceivingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey, WorkerId

QUIET_LOOKS = 10  # in a row that find nothing unread, and what lies between two: longer than a way to the peer and back
QUIET_LOOK_S = 0.02
FASTEST_POLL_S = 0.00005  # just after an arrival
SLOWEST_POLL_S = 0.0002  # between a prefill's chunks; a write shows at the second poll (docs/lab-notes.md)
JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)

OnArrival = Callable[[TransferKey, int, int], None]
OnFailure = Callable[[TransferKey, TransferError], None]


@dataclass(slots=True, eq=False)
class _Incoming:
    """One open transfer. `writing` is held while an emulated wire copies into its pages."""

    key: TransferKey
    pages: tuple[PageId, ...]
    timeout_s: float  # without a page
    last_progress_s: float
    missing: set[int]  # indexes that have not landed
    failed: bool = False
    closed: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class _Quieting:
    """Somebody waits until nothing of transfers that are over can be written any more."""

    then: Callable[[], None]
    next_look_s: float
    looks: int = 0


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
        self._open: dict[TransferKey, _Incoming] = {}
        self._peers: dict[WorkerId, Peer] = {}
        self._heads: dict[Peer, range] = {}  # of those that have a share of our pages' heads
        self._awaited: dict[Epoch, float] = {}  # peers that may be connecting, and until when
        self._events: deque[Callable[[], None]] = deque()
        self._quieting: list[_Quieting] = []
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
            known = self._peers.get(peer_worker_id)
            if known is not None and known.epoch > peer_epoch:
                raise TransferError(f"{peer_worker_id}: epoch {peer_epoch} is past, {known.epoch} has come since")
            self._peers[peer_worker_id] = peer
            if heads not in (None, self._layout.heads):
                self._heads[peer] = heads
            if self._polled:
                self._awaited[peer_epoch] = time.monotonic() + self._config.connect_timeout_s
                self._lock.notify()
        if known is not None and known != peer:
            self.forget(known)
        details = tuple((wire.name, wire.offer(peer)) for wire in self._wires)
        share = self._heads.get(peer)
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
            if key in self._open:
                raise TransferError(f"transfer {key.transfer_id}: already open")
            self._open[key] = _Incoming(key, tuple(pages), bound_s, now_s, set(range(len(pages))))
            self._lock.notify()

    def close(self, key: TransferKey) -> None:
        """No callback of it starts after this, and no emulated wire writes its pages. A one-sided wire still may,
        until the sender says that it is over. Blocks for a copy into its pages that runs right now; idempotent."""
        with self._lock:
            incoming = self._open.pop(key, None)
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
                self._quieting.append(_Quieting(then, time.monotonic() + QUIET_LOOK_S))
                self._lock.notify()
                return
        self._guard(then)

    def forget(self, peer: Peer) -> None:
        """The incarnation is known to be dead: fails what it has open and drops its connections."""
        with self._lock:
            self._awaited.pop(peer.epoch, None)
            self._heads.pop(peer, None)
            if self._peers.get(peer.worker_id) == peer:
                del self._peers[peer.worker_id]
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
            open_now, self._open = list(self._open.values()), {}
        for incoming in open_now:
            with incoming.writing:
                incoming.closed = True
        for wire in self._wires:
            wire.close()

    # Landing: called by wires from threads of their own.

    def land(self, arrival: Arrival, staged: PageBuffer) -> bool:
        with self._lock:
            incoming = self._open.get(arrival.key)
        if incoming is None or not _in_range(incoming, arrival):
            self._ignore(arrival)
            return False
        with incoming.writing:
            if incoming.closed or incoming.failed:
                self._ignore(arrival)
                return False
            # A duplicate may come after the fence was lifted for pages that have all landed: it must write nothing.
            fresh = [index for index in _indexes(arrival) if index in incoming.missing]
            offsets = [PageId(index - arrival.first_index) for index in fresh]
            self._scatter([incoming.pages[index] for index in fresh], staged, offsets, arrival.key.sender_epoch)
            self._pages.settle()  # the engine's stream may read them as soon as they are reported
            with self._lock:
                incoming.missing -= set(fresh)
                incoming.last_progress_s = time.monotonic()
        if not fresh:
            self._ignore(arrival)
            return True
        self._guard(lambda: self._tell(arrival))
        return True

    def _scatter(
        self, pages: Sequence[PageId], staged: PageBuffer, offsets: Sequence[PageId], sender_epoch: Epoch
    ) -> None:
        rows = next((self.rows_of(peer) for peer in self._heads if peer.epoch == sender_epoch), WHOLE_PAGE)
        if rows == WHOLE_PAGE:
            self._pages.scatter(pages, staged, offsets)
            return
        into, of = rows_of_pages(pages, rows.num_in_page, rows.places), range(rows.num_in_part)
        source = rows_of_pages(offsets, rows.num_in_part, of)
        self._pages.in_rows(rows.num_in_page).scatter(into, staged.in_rows(rows.num_in_part), source)

    def rows_of(self, peer: Peer) -> PageRows:
        heads = self._heads.get(peer)
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
            due = [one for one in self._quieting if one.next_look_s <= now_s]
        if not due:
            return
        nothing_unread = unread_bytes() == 0
        for one in due:
            one.looks, one.next_look_s = (one.looks + 1 if nothing_unread else 0), now_s + QUIET_LOOK_S
        with self._lock:
            quiet = [one for one in self._quieting if one.looks >= QUIET_LOOKS]
            self._quieting = [one for one in self._quieting if one.looks < QUIET_LOOKS]
        for one in quiet:
            self._guard(one.then)

    def _must_poll(self, now_s: float) -> bool:
        if not self._polled:
            return False
        self._awaited = {epoch: until_s for epoch, until_s in self._awaited.items() if until_s > now_s}
        # Until the caller closes it, landed or failed: a sender cannot end its last push on a wire that nobody drives.
        return bool(self._awaited) or bool(self._open) or bool(self._quieting)

    def _pause_s(self, now_s: float) -> float | None:
        """How long the thread may sleep unless it is woken; None: for ever."""
        waiting = [item for item in self._open.values() if item.missing and not item.failed]
        if not self._must_poll(now_s):
            next_s = min((item.last_progress_s + item.timeout_s for item in waiting), default=math.inf)
            return None if math.isinf(next_s) else max(0.0, next_s - now_s)
        quiet_s = now_s - max(item.last_progress_s for item in waiting) if waiting else SLOWEST_POLL_S * 8
        return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, quiet_s / 8))

    def _poll(self, wire: ReceivingTransport) -> None:
        arrivals = wire.poll()
        for epoch in wire.heard_from():
            with self._lock:
                self._has_polled_peers = True
                self._awaited.pop(epoch, None)
        for arrival in arrivals:
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        """Of pages that the peer has written by itself."""
        with self._lock:
            incoming = self._open.get(arrival.key)
            if incoming is not None and not incoming.failed and _in_range(incoming, arrival):
                incoming.last_progress_s = time.monotonic()
                incoming.missing -= set(_indexes(arrival))
        self._tell(arrival)

    def _tell(self, arrival: Arrival) -> None:
        with self._lock:
            incoming = self._open.get(arrival.key)
            if known := incoming is not None and not incoming.failed and _in_range(incoming, arrival):
                self.stats.num_pages += arrival.num_pages
        if not known:
            self._ignore(arrival)
            return
        self._on_arrival(arrival.key, arrival.first_index, arrival.num_pages)

    def _fail_stalled(self, now_s: float) -> None:
        with self._lock:
            stalled = [
                item for item in self._open.values() if item.missing and now_s >= item.last_progress_s + item.timeout_s
            ]
        for item in stalled:
            message = f"no page for {item.timeout_s} s, {len(item.missing)} of {len(item.pages)} missing"
            self._fail(item, TransferError(f"transfer {item.key.transfer_id}: {message}"))

    def _fail_all(self, peer: Peer, error: TransferError) -> None:
        with self._lock:
            found = [item for item in self._open.values() if item.key.sender_epoch == peer.epoch and item.missing]
        for incoming in found:
            self._post(lambda incoming=incoming: self._fail(incoming, error))  # type: ignore[misc]

    def _fail(self, incoming: _Incoming, error: TransferError) -> None:
        """Once a transfer; it stays known until the caller closes it, and nothing is written any more."""
        with self._lock:
            if incoming.failed or not incoming.missing or self._open.get(incoming.key) is not incoming:
                return
            incoming.failed = True
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


def _indexes(arrival: Arrival) -> range:
    return range(arrival.first_index, arrival.first_index + arrival.num_pages)


def _in_range(incoming: _Incoming, arrival: Arrival) -> bool:
    return arrival.first_index + arrival.num_pages <= len(incoming.pages)
