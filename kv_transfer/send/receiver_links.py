"""Keeps a sender's links, one for each receiver incarnation: connects them, moves pages over them, reports which
transfers are over.

It sits between the sender (sender.py) and the transports. It owns the receivers with their queues, and the paths to
them. Only the sender's thread calls it, so it needs no lock. A separate thread connects each receiver: it reads only
the offer and the path, which do not change, and posts the result to the sender's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.guarded import guarded
from kv_transfer.layout.reshard import ReshardPlan
from kv_transfer.send.connect import common_transports, connect
from kv_transfer.send.layout_paths import LayoutPath, LayoutPaths
from kv_transfer.send.send_queue import OutgoingTransfer, QueuedPush, ReadyEvent, SendQueue
from kv_transfer.session.handshake import Offer
from kv_transfer.transports.transport import LayerGroup, SendingTransport, TransportLink
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferKey

FASTEST_POLL_S = 0.00002  # pause just after a push began or ended, on a polled transport
SLOWEST_POLL_S = 0.0002  # longest pause while a push is in flight
IDLE_LINK_S = 300.0  # an idle link is closed after this long, as reconnecting is cheap
LAYER_GROUPS = 4  # three more pushes leave only a quarter of a chunk's transfer after its computation

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SenderStats:
    """Counters since the start. The sender's thread keeps them, but callers count `num_groups_ahead` under the sender's
    lock.
    """

    num_pages: int = 0
    num_bytes: int = 0
    num_groups_ahead: int = 0  # pushes of a layer group before the last one
    num_connects: int = 0
    num_fallbacks: int = 0  # transports that failed to connect
    num_failures: int = 0  # transfers


@dataclass(slots=True, eq=False)
class _Receiver:
    """A receiver incarnation."""

    offer: Offer
    path: LayoutPath
    queue: SendQueue
    idle_since_s: float


class ReceiverLinks:
    """Owns the links. Only the sender's thread uses it, and all callbacks run there except `post`, for connecting
    threads.
    """

    def __init__(
        self,
        paths: LayoutPaths,
        num_layers: int,
        config: TransferConfig,
        stats: SenderStats,
        post: Callable[[Callable[[], None]], bool],
        on_layer_groups: Callable[[Epoch, int], None],
        on_failure: Callable[[TransferKey, TransferError], None],
        on_over: Callable[[TransferKey], None],
    ) -> None:
        """`post` makes the sender's thread run a function, or returns False if the thread is ending. `on_layer_groups`
        receives the number of groups of layers into which pushes to a receiver should be cut: 1 once its link is gone.
        `on_over` is called once for each transfer, after its `on_failure` if there is one (sender.py).
        """
        self._paths = paths
        self._transports = paths.own.transports()
        self._num_layers = num_layers
        self._config = config
        self._stats = stats
        self._post = post
        self._on_layer_groups = on_layer_groups
        self._on_failure = on_failure
        self._on_over = on_over
        self._receivers: dict[Epoch, _Receiver] = {}
        self._reported: set[TransferKey] = set()  # transfers whose failure has been reported

    def open(self, key: TransferKey, offer: Offer, plan: ReshardPlan, lane: Lane) -> None:
        """Opens a transfer and starts to connect if there is no link yet."""
        receiver = self._receivers.get(offer.receiver_epoch)
        if receiver is None:
            path, unused = self._paths.find(plan, [other.path for other in self._receivers.values()])
            self._close_transports(unused)
            receiver = _Receiver(offer, path, SendQueue(plan.target.page_bytes), time.monotonic())
            self._receivers[offer.receiver_epoch] = receiver
            threading.Thread(target=self._connect, args=(receiver,), name="kv-connect", daemon=True).start()
        transfer = receiver.queue.transfers[key] = OutgoingTransfer(key, lane)
        if receiver.offer.layout != offer.layout:
            transfer.error = TransferError(
                f"offer.layout: {offer.layout}, but the same receiver offered {receiver.offer.layout} before"
            )

    def push(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: tuple[PageId, ...],
        dst_pages: tuple[PageId, ...],
        ready: ReadyEvent | None,
        layer_group: LayerGroup,
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
            sources = receiver.path.sources(tokens, src_pages, len(dst_pages))
        except TransferError as error:
            transfer.error = TransferError(f"transfer {key.transfer_id}: {error}")
            return
        receiver.queue.add(QueuedPush(transfer, first_index, sources, dst_pages, ready, layer_group))

    def finish(self, key: TransferKey) -> None:
        if (found := self._find(key)) is not None:
            found[1].finishing = True

    def abort(self, key: TransferKey) -> None:
        if (found := self._find(key)) is not None:
            found[1].aborted = True

    def advance(self) -> None:
        """Collects pushes that have ended, starts those that may start, and reports transfers that are over."""
        for receiver in list(self._receivers.values()):
            guarded(partial(self._advance, receiver, time.monotonic()))

    def pause_s(self, now_s: float) -> float | None:
        """Returns how long the sender's thread may sleep unless it is woken; None means forever."""
        pauses: list[float] = []
        for receiver in self._receivers.values():
            if receiver.queue.waits_for_polling:
                idle_s = now_s - receiver.queue.last_progress_s
                return min(SLOWEST_POLL_S, max(FASTEST_POLL_S, idle_s / 8))
            if receiver.queue.busy:
                pauses.append(receiver.queue.last_progress_s + self._config.timeout_s - now_s)
            elif not receiver.queue.transfers:
                pauses.append(receiver.idle_since_s + IDLE_LINK_S - now_s)
        return max(0.001, min(pauses)) if pauses else None

    def close(self) -> None:
        """Fails every open transfer, and closes every link and transport."""
        for receiver in list(self._receivers.values()):
            self._drop(receiver, TransferError("this sender is shut down"))
        self._close_transports(self._paths.close())

    def _connect(self, receiver: _Receiver) -> None:
        """Connects one receiver. Runs in its own thread, for at most connect_timeout_s per transport."""
        result: tuple[str, TransportLink, int] | TransferError
        try:
            result = connect(receiver.offer, receiver.path.transports(), receiver.path.rows)
        except TransferError as error:
            result = error
        except Exception as error:
            log.exception("connecting failed")
            result = TransferError(f"connecting to receiver epoch {receiver.offer.receiver_epoch}: {error}")
        if not self._post(partial(self._connected, receiver, result)) and not isinstance(result, TransferError):
            result[1].close()

    def _connected(self, receiver: _Receiver, result: tuple[str, TransportLink, int] | TransferError) -> None:
        if isinstance(result, TransferError):
            self._stats.num_fallbacks += len(common_transports(receiver.offer, self._transports)) - 1
            self._drop(receiver, result)
            return
        name, link, num_failed = result
        self._stats.num_connects += 1
        self._stats.num_fallbacks += num_failed
        log.info("connected to receiver epoch %d over %s", receiver.offer.receiver_epoch, name)
        receiver.queue.connect(link, receiver.path.staging)
        self._on_layer_groups(receiver.offer.receiver_epoch, self._choose_layer_groups(receiver, link))

    def _choose_layer_groups(self, receiver: _Receiver, link: TransportLink) -> int:
        """Returns the largest number of groups, up to the desired one, that divides this layout's layers evenly."""
        wanted = self._config.layer_groups or (LAYER_GROUPS if link.gains_from_layer_groups else 1)
        if not link.takes_layer_groups or not receiver.path.plan.whole_pages:
            return 1
        return max(count for count in range(1, wanted + 1) if self._num_layers % count == 0)

    def _find(self, key: TransferKey) -> tuple[_Receiver, OutgoingTransfer] | None:
        receiver = self._receivers.get(key.receiver_epoch)
        transfer = receiver.queue.transfers.get(key) if receiver is not None else None
        return (receiver, transfer) if receiver is not None and transfer is not None else None

    def _advance(self, receiver: _Receiver, now_s: float) -> None:
        queue = receiver.queue
        try:
            queue.reap(now_s)
            while queue.post(now_s):
                queue.reap(now_s)  # a write is often complete by the time the call that posts it returns
            if queue.stalled(now_s, self._config.timeout_s):
                raise TransferError(
                    f"receiver epoch {receiver.offer.receiver_epoch}: no push ended for {self._config.timeout_s} s"
                )
        except TransferError as error:
            self._drop(receiver, error)
            return
        except Exception as error:  # an error in a transport must not end the thread that serves all transfers
            log.exception("a link failed")
            self._drop(receiver, TransferError(f"receiver epoch {receiver.offer.receiver_epoch}: {error!r}"))
            return
        self._report(queue)
        if queue.transfers:
            receiver.idle_since_s = now_s
        elif now_s - receiver.idle_since_s > IDLE_LINK_S:
            self._drop(receiver, TransferError("idle"))

    def _drop(self, receiver: _Receiver, error: TransferError) -> None:
        """Closes a link and ends every transfer on it; the next transfer connects again."""
        self._receivers.pop(receiver.offer.receiver_epoch, None)
        self._on_layer_groups(receiver.offer.receiver_epoch, 1)
        queue = receiver.queue
        if queue.link is not None:
            guarded(queue.link.close)
        queue.fail(error)
        self._report(queue)

    def _report(self, queue: SendQueue) -> None:
        """Reports to the owner which transfers have failed and which are over."""
        self._stats.num_pages += queue.num_pages_sent
        self._stats.num_bytes += queue.num_pages_sent * queue.page_bytes
        queue.num_pages_sent = 0
        for transfer in queue.transfers.values():
            if transfer.error is not None and not transfer.aborted and transfer.key not in self._reported:
                self._reported.add(transfer.key)
                self._stats.num_failures += 1
                guarded(partial(self._on_failure, transfer.key, transfer.error))
        for transfer in queue.pop_over():
            self._reported.discard(transfer.key)
            guarded(partial(self._on_over, transfer.key))

    def _close_transports(self, unused: Sequence[SendingTransport]) -> None:
        for transport in unused:
            guarded(transport.close)
