"""The prefill worker's end of KV transfers: pushes pages as chunks complete, and says when a transfer is over.

Between the prefill worker's loop, which opens transfers and hands in pages, and the wires. Owns the links (one for
each receiver incarnation) and their outboxes; never touches the page pool's bookkeeping: the caller keeps source pages
until `on_done`. What a transfer moves is named in tokens, so the receiver's pages may be of another size, or hold a
share of the heads: such pages are staged, in its layout, as they go out (staging.py).

Every opened transfer ends with exactly one `on_done(key)`, after at most one `on_failure(key, error)`. `on_done` says
that nothing of it is read or written any more: it is then that source pages go back and the receiver is told that the
transfer is closed. A failed transfer's `on_done` follows its `on_failure`, at once or after what was under way.

One thread, asleep while nothing is under way; connecting runs in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.kv_layout import KVLayout
from kv_transfer.connect import common_wires, connect
from kv_transfer.handshake import Offer, parse_offer
from kv_transfer.lanes import Lane, Lanes
from kv_transfer.outbox import Gate, Item, Outbox, Outgoing
from kv_transfer.pages import PageBuffer
from kv_transfer.reshard import Plan, make_plan
from kv_transfer.transport import WHOLE, Link, Part, SendingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey
from penstock.types import Lane as RequestLane

FASTEST_POLL_S = 0.00002  # just after a push began or ended, on a wire that must be polled
SLOWEST_POLL_S = 0.0002  # while one is under way
IDLE_LINK_S = 300.0  # a link without transfers is closed after it; connecting again is cheap
JOIN_TIMEOUT_S = 5.0
LAYER_GROUPS = 4  # exposes a quarter of a chunk's transfer, for three more pushes

log = logging.getLogger(__name__)

OnDone = Callable[[TransferKey], None]
OnFailure = Callable[[TransferKey, TransferError], None]


@dataclass(slots=True)
class SenderStats:
    """Counters since the start."""

    num_pages: int = 0
    num_parts_ahead: int = 0  # pushes of a part of some pages, before their last one
    num_connects: int = 0
    num_fallbacks: int = 0  # wires that failed to connect, so that the next one was tried
    num_failures: int = 0  # transfers


@dataclass(slots=True, eq=False)
class _Receiver:
    """One receiver incarnation."""

    offer: Offer
    lane: Lane
    outbox: Outbox
    idle_since_s: float


class TransferSender:
    """Safe from any thread. Callbacks run on the sender's own thread and must not block."""

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        epoch: Epoch,
        config: TransferConfig,
        on_done: OnDone,
        on_failure: OnFailure,
    ) -> None:
        self._pages = PageBuffer(pool)
        if self._pages.page_bytes != layout.page_bytes:
            raise ValueError(f"pool pages have {self._pages.page_bytes} bytes, the layout says {layout.page_bytes}")
        self._layout = layout
        self._epoch = epoch
        self._config = config
        self._on_done = on_done
        self._on_failure = on_failure
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._woken = False
        self._stopping = False
        self._open: set[TransferKey] = set()  # until on_done
        self._num_parts: dict[Epoch, int] = {}  # of receivers with a link
        self._receivers: dict[Epoch, _Receiver] = {}  # the thread's own, as all below
        self._reported: set[TransferKey] = set()  # failures
        self.stats = SenderStats()
        self._lanes = Lanes(layout, pool, config, epoch, self._wake)
        self._wires = self._lanes.own.wires()
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    @property
    def transports(self) -> list[str]:
        return list(self._wires)

    def open(self, key: TransferKey, offer: bytes, lane: RequestLane = RequestLane.STANDARD) -> Plan:
        """Starts to connect where there is no link yet. Returns how pages of here become the receiver's. Raises
        TransferRefused where they cannot, and TransferError for an offer that cannot be used; then the transfer is not
        open and no callback comes."""
        parsed = parse_offer(offer)
        plan = make_plan(self._layout, parsed.layout, range(*parsed.heads) if parsed.heads else None)
        common_wires(parsed, self._wires)
        if key.sender_epoch != self._epoch or key.receiver_epoch != parsed.receiver_epoch:
            raise TransferError(
                f"transfer {key.transfer_id}: epochs {key.sender_epoch} -> {key.receiver_epoch}, want {self._epoch} "
                f"(this sender) -> {parsed.receiver_epoch} (the offer's); one of the ends has restarted"
            )
        with self._lock:
            if self._stopping:
                raise TransferError(f"transfer {key.transfer_id}: this sender is shut down")
            if key in self._open:
                raise TransferError(f"transfer {key.transfer_id}: already open")
            self._open.add(key)
            self._submit(partial(self._do_open, key, parsed, plan, lane))
        return plan

    def push(
        self, key: TransferKey, first_index: int, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]
    ) -> None:
        """Moves src_pages[i] of this pool to dst_pages[i] of the receiver's, the transfer's pages from `first_index`
        on. Pushes of a key start in order. Without effect on a transfer that has failed or is not open; one to a
        receiver of another layout fails: see `push_tokens`."""
        if len(src_pages) != len(dst_pages) or not src_pages or first_index < 0:
            raise ValueError(f"push of {len(src_pages)} pages to {len(dst_pages)} at index {first_index}")
        self._check_pages(src_pages, dst_pages)
        self._submit_push(key, first_index, range(0), src_pages, dst_pages)

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        part: Part = WHOLE,
    ) -> None:
        """Moves the KV of `tokens` to `dst_pages` of the receiver's, whatever the size of its pages: `tokens` begins
        one of them and fills all but perhaps the last. `src_pages` are the sequence's pages here, from its first token
        on. Else as `push`. Where `num_parts` allows it, parts of pages may go one by one, the last of them last."""
        if not tokens or tokens.start < 0 or not dst_pages or first_index < 0:
            raise ValueError(f"push of {tokens} to {len(dst_pages)} pages at index {first_index}")
        if tokens.stop > len(src_pages) * self._layout.page_size:
            raise ValueError(f"push of {tokens} from {len(src_pages)} pages of {self._layout.page_size} tokens")
        self._check_pages(src_pages, dst_pages)
        self._submit_push(key, first_index, tokens, src_pages, dst_pages, part)

    def num_parts(self, key: TransferKey) -> int:
        """In how many runs of layers it is worth to push pages, each as soon as it is written; 1: whole pages."""
        with self._lock:
            return self._num_parts.get(key.receiver_epoch, 1)

    def _check_pages(self, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]) -> None:
        if not (min(src_pages) >= 0 and max(src_pages) < self._pages.num_pages and min(dst_pages) >= 0):
            raise ValueError(f"push of pages {min(src_pages)}..{max(src_pages)}, the pool has {self._pages.num_pages}")

    def _submit_push(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        part: Part = WHOLE,
    ) -> None:
        """`tokens` empty: the source pages are those to be moved, not the sequence's."""
        gate: Gate | None = None
        if self._pages.is_cuda:  # what the caller's stream has launched so far writes the pages
            gate = torch.cuda.Event()
            gate.record()
        with self._lock:
            self.stats.num_parts_ahead += not part.is_last
            push = partial(self._do_push, key, first_index, tokens, tuple(src_pages), tuple(dst_pages), gate, part)
            self._submit(push)

    def finish(self, key: TransferKey) -> None:
        """No more pushes will come: on_done(key) follows once every push is complete."""
        with self._lock:
            self._submit(partial(self._do_finish, key))

    def abort(self, key: TransferKey) -> None:
        """Starts nothing more of it: on_done(key) follows once nothing of it can be written any more."""
        with self._lock:
            self._submit(partial(self._do_abort, key))

    def is_open(self, key: TransferKey) -> bool:
        """Whether the transfer may still write: until its on_done."""
        with self._lock:
            return key in self._open

    def shutdown(self) -> None:
        """Fails what is open, closes every link. Blocks until the thread has ended, a few seconds at most."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._lock.notify()

    def _wake(self) -> None:
        """Called by links from their own threads when a push has ended."""
        with self._lock:
            self._woken = True
            self._lock.notify()

    # The sender's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._commands and not self._woken and not self._stopping:
                    self._lock.wait(self._pause_s(time.monotonic()))
                commands, self._commands = self._commands, deque()
                self._woken = False
                stopping = self._stopping
            for command in commands:
                self._guard(command)
            for receiver in list(self._receivers.values()):
                self._guard(partial(self._advance, receiver, time.monotonic()))
            if stopping:
                self._guard(self._close_all)
                return

    def _pause_s(self, now_s: float) -> float | None:
        """How long the thread may sleep unless it is woken; None: for ever."""
        pauses: list[float] = []
        for receiver in self._receivers.values():
            if receiver.outbox.waits_for_polling:
                quiet_s = now_s - receiver.outbox.last_progress_s
                return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, quiet_s / 8))
            if receiver.outbox.busy:
                pauses.append(receiver.outbox.last_progress_s + self._config.timeout_s - now_s)
            elif not receiver.outbox.transfers:
                pauses.append(receiver.idle_since_s + IDLE_LINK_S - now_s)
        return max(0.001, min(pauses)) if pauses else None

    def _do_open(self, key: TransferKey, offer: Offer, plan: Plan, request_lane: RequestLane) -> None:
        receiver = self._receivers.get(offer.receiver_epoch)
        if receiver is None:
            lane, unused = self._lanes.find(plan, [one.lane for one in self._receivers.values()])
            self._close_wires(unused)
            receiver = _Receiver(offer, lane, Outbox(plan.target.page_bytes), time.monotonic())
            self._receivers[offer.receiver_epoch] = receiver
            threading.Thread(target=self._connect, args=(receiver,), name="kv-connect", daemon=True).start()
        transfer = receiver.outbox.transfers[key] = Outgoing(key, request_lane)
        if receiver.offer.layout != offer.layout:
            transfer.error = TransferError(
                f"offer.layout: {offer.layout}, but {receiver.offer.layout} was offered before"
            )

    def _connect(self, receiver: _Receiver) -> None:
        """In a thread of its own; each wire bounds it by connect_timeout_s."""
        result: tuple[str, Link, int] | TransferError
        try:
            result = connect(receiver.offer, receiver.lane.wires(), receiver.lane.rows)
        except TransferError as error:
            result = error
        except Exception as error:
            log.exception("connecting failed")
            result = TransferError(f"connecting to receiver epoch {receiver.offer.receiver_epoch}: {error}")
        with self._lock:
            if not self._stopping:
                self._submit(partial(self._do_connected, receiver, result))
                return
        if not isinstance(result, TransferError):
            result[1].close()

    def _do_connected(self, receiver: _Receiver, result: tuple[str, Link, int] | TransferError) -> None:
        if isinstance(result, TransferError):
            self.stats.num_fallbacks += len(common_wires(receiver.offer, self._wires)) - 1
            self._drop(receiver, result)
            return
        name, link, num_failed = result
        self.stats.num_connects += 1
        self.stats.num_fallbacks += num_failed
        log.info("connected to receiver epoch %d over %s", receiver.offer.receiver_epoch, name)
        receiver.outbox.staging = receiver.lane.staging
        receiver.outbox.link = link
        with self._lock:
            self._num_parts[receiver.offer.receiver_epoch] = self._choose_parts(receiver, link)

    def _choose_parts(self, receiver: _Receiver, link: Link) -> int:
        """The most that are wanted and into which this layout's layers can be cut evenly."""
        wanted = self._config.layer_groups or (LAYER_GROUPS if link.gains_from_parts else 1)
        if not link.takes_parts or not receiver.lane.plan.whole_pages:
            return 1
        return max(count for count in range(1, wanted + 1) if len(self._layout.layers) % count == 0)

    def _find(self, key: TransferKey) -> tuple[_Receiver, Outgoing] | None:
        receiver = self._receivers.get(key.receiver_epoch)
        transfer = receiver.outbox.transfers.get(key) if receiver is not None else None
        return (receiver, transfer) if receiver is not None and transfer is not None else None

    def _do_push(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: tuple[PageId, ...],
        dst_pages: tuple[PageId, ...],
        gate: Gate | None,
        part: Part,
    ) -> None:
        found = self._find(key)
        if found is None or found[1].cut_short:
            return
        if found[1].finishing:
            log.error("transfer %s: a push after finish was dropped", key.transfer_id)
            found[1].error = TransferError(f"transfer {key.transfer_id}: push after finish")
            return
        receiver, transfer = found
        try:
            sources = receiver.lane.sources(tokens, src_pages, len(dst_pages))
        except TransferError as error:
            transfer.error = TransferError(f"transfer {key.transfer_id}: {error}")
            return
        receiver.outbox.add(Item(transfer, first_index, sources, dst_pages, gate, part))

    def _do_finish(self, key: TransferKey) -> None:
        if (found := self._find(key)) is not None:
            found[1].finishing = True

    def _do_abort(self, key: TransferKey) -> None:
        if (found := self._find(key)) is not None:
            found[1].aborted = True

    def _advance(self, receiver: _Receiver, now_s: float) -> None:
        outbox = receiver.outbox
        try:
            outbox.reap(now_s)
            while outbox.post(now_s):
                outbox.reap(now_s)  # a write is often over when the call that posts it returns, which lets more start
            if outbox.stalled(now_s, self._config.timeout_s):
                raise TransferError(
                    f"receiver epoch {receiver.offer.receiver_epoch}: no push ended for {self._config.timeout_s} s"
                )
        except TransferError as error:
            self._drop(receiver, error)
            return
        except Exception as error:  # a wire's fault must not end the thread that serves every transfer
            log.exception("a link failed")
            self._drop(receiver, TransferError(f"receiver epoch {receiver.offer.receiver_epoch}: {error!r}"))
            return
        self._report(outbox)
        if outbox.transfers:
            receiver.idle_since_s = now_s
        elif now_s - receiver.idle_since_s > IDLE_LINK_S:
            self._drop(receiver, TransferError("idle"))

    def _drop(self, receiver: _Receiver, error: TransferError) -> None:
        """Ends a link and every transfer on it; the next transfer connects anew."""
        self._receivers.pop(receiver.offer.receiver_epoch, None)
        with self._lock:
            self._num_parts.pop(receiver.offer.receiver_epoch, None)
        outbox = receiver.outbox
        if outbox.link is not None:
            self._guard(outbox.link.close)
        outbox.fail(error)
        self._report(outbox)

    def _report(self, outbox: Outbox) -> None:
        """Tells the owner what failed, and what is over."""
        self.stats.num_pages += outbox.num_pages_sent
        outbox.num_pages_sent = 0
        for transfer in outbox.transfers.values():
            if transfer.error is not None and not transfer.aborted and transfer.key not in self._reported:
                self._reported.add(transfer.key)
                self.stats.num_failures += 1
                self._guard(partial(self._on_failure, transfer.key, transfer.error))
        for transfer in outbox.take_over():
            self._reported.discard(transfer.key)
            with self._lock:
                self._open.discard(transfer.key)
            self._guard(partial(self._on_done, transfer.key))

    def _close_all(self) -> None:
        for receiver in list(self._receivers.values()):
            self._drop(receiver, TransferError("this sender is shut down"))
        self._close_wires(self._lanes.close())

    def _close_wires(self, unused: Sequence[SendingTransport]) -> None:
        for wire in unused:
            self._guard(wire.close)

    def _guard(self, event: Callable[[], None]) -> None:
        """A fault in one transfer or callback must not end the thread that serves every transfer."""
        try:
            event()
        except Exception:
            log.exception("handling a transfer failed")
