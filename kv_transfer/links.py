"""A sender's links, one for each receiver incarnation: connecting them, moving pages over them, saying what is over.

Between the sender (sender.py), whose thread alone calls it, and the wires. Owns the receivers with their outboxes, and
the lanes that lead to them; needs no lock. A thread of its own connects a receiver: it reads what does not change,
offer and lane, and posts what came of it to the sender's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.connect import common_wires, connect
from kv_transfer.handshake import Offer
from kv_transfer.lanes import Lane, Lanes
from kv_transfer.outbox import Gate, Item, Outbox, Outgoing
from kv_transfer.reshard import Plan
from kv_transfer.transport import Link, Part, SendingTransport
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey
from penstock.types import Lane as RequestLane

FASTEST_POLL_S = 0.00002  # just after a push began or ended, on a wire that must be polled
SLOWEST_POLL_S = 0.0002  # while one is under way
IDLE_LINK_S = 300.0  # a link without transfers is closed after it; connecting again is cheap
LAYER_GROUPS = 4  # exposes a quarter of a chunk's transfer, for three more pushes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SenderStats:
    """Counters since the start, kept by the sender's thread; `num_parts_ahead` by callers, under the sender's lock."""

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


class Links:
    """Used by the sender's thread alone. Callbacks run on it, but for `post`, which connecting threads call."""

    def __init__(
        self,
        lanes: Lanes,
        num_layers: int,
        config: TransferConfig,
        stats: SenderStats,
        post: Callable[[Callable[[], None]], bool],
        on_parts: Callable[[Epoch, int], None],
        on_failure: Callable[[TransferKey, TransferError], None],
        on_over: Callable[[TransferKey], None],
    ) -> None:
        """`post` has the sender's thread run something, or says that it ends. `on_parts` tells in how many runs of
        layers it is worth to push pages to a receiver: 1 where its link is gone. `on_over` follows a transfer's
        `on_failure`, if there is one, and comes once (sender.py)."""
        self._lanes = lanes
        self._wires = lanes.own.wires()
        self._num_layers = num_layers
        self._config = config
        self._stats = stats
        self._post = post
        self._on_parts = on_parts
        self._on_failure = on_failure
        self._on_over = on_over
        self._receivers: dict[Epoch, _Receiver] = {}
        self._reported: set[TransferKey] = set()  # failures

    def open(self, key: TransferKey, offer: Offer, plan: Plan, request_lane: RequestLane) -> None:
        """Starts to connect where there is no link yet."""
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

    def push(
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

    def finish(self, key: TransferKey) -> None:
        if (found := self._find(key)) is not None:
            found[1].finishing = True

    def abort(self, key: TransferKey) -> None:
        if (found := self._find(key)) is not None:
            found[1].aborted = True

    def advance(self) -> None:
        """Takes note of what has ended, starts what may start, reports what is over."""
        for receiver in list(self._receivers.values()):
            guarded(partial(self._advance, receiver, time.monotonic()))

    def pause_s(self, now_s: float) -> float | None:
        """How long the sender's thread may sleep unless it is woken; None: for ever."""
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

    def close(self) -> None:
        """Fails what is open, closes every link and wire."""
        for receiver in list(self._receivers.values()):
            self._drop(receiver, TransferError("this sender is shut down"))
        self._close_wires(self._lanes.close())

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
        if not self._post(partial(self._connected, receiver, result)) and not isinstance(result, TransferError):
            result[1].close()

    def _connected(self, receiver: _Receiver, result: tuple[str, Link, int] | TransferError) -> None:
        if isinstance(result, TransferError):
            self._stats.num_fallbacks += len(common_wires(receiver.offer, self._wires)) - 1
            self._drop(receiver, result)
            return
        name, link, num_failed = result
        self._stats.num_connects += 1
        self._stats.num_fallbacks += num_failed
        log.info("connected to receiver epoch %d over %s", receiver.offer.receiver_epoch, name)
        receiver.outbox.staging = receiver.lane.staging
        receiver.outbox.link = link
        self._on_parts(receiver.offer.receiver_epoch, self._choose_parts(receiver, link))

    def _choose_parts(self, receiver: _Receiver, link: Link) -> int:
        """The most that are wanted and into which this layout's layers can be cut evenly."""
        wanted = self._config.layer_groups or (LAYER_GROUPS if link.gains_from_parts else 1)
        if not link.takes_parts or not receiver.lane.plan.whole_pages:
            return 1
        return max(count for count in range(1, wanted + 1) if self._num_layers % count == 0)

    def _find(self, key: TransferKey) -> tuple[_Receiver, Outgoing] | None:
        receiver = self._receivers.get(key.receiver_epoch)
        transfer = receiver.outbox.transfers.get(key) if receiver is not None else None
        return (receiver, transfer) if receiver is not None and transfer is not None else None

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
        self._on_parts(receiver.offer.receiver_epoch, 1)
        outbox = receiver.outbox
        if outbox.link is not None:
            guarded(outbox.link.close)
        outbox.fail(error)
        self._report(outbox)

    def _report(self, outbox: Outbox) -> None:
        """Tells the owner what failed, and what is over."""
        self._stats.num_pages += outbox.num_pages_sent
        outbox.num_pages_sent = 0
        for transfer in outbox.transfers.values():
            if transfer.error is not None and not transfer.aborted and transfer.key not in self._reported:
                self._reported.add(transfer.key)
                self._stats.num_failures += 1
                guarded(partial(self._on_failure, transfer.key, transfer.error))
        for transfer in outbox.take_over():
            self._reported.discard(transfer.key)
            guarded(partial(self._on_over, transfer.key))

    def _close_wires(self, unused: Sequence[SendingTransport]) -> None:
        for wire in unused:
            guarded(wire.close)


def guarded(event: Callable[[], None]) -> None:
    """A fault in one transfer or callback must not end the thread that serves every transfer."""
    try:
        event()
    except Exception:
        log.exception("handling a transfer failed")
