"""Implements the torch.distributed transport: gloo between CPU pools, NCCL between CUDA pools, one two-rank group per
pair.

Headers and acknowledgements go over a `Channel`, page bytes over the group. So an idle pair holds no pending receive
(NCCL would spin on the GPU, and gloo cannot cancel one), and a dead peer shows at once. The sender packs a push into
one staging tensor; the receiver receives it in another, and copies it into its pool only while the transfer is open
there, so a closed transfer can never write. A push is done when the receiver has acknowledged it. Between GPUs each end
has two staging tensors, so that one push is packed or copied while another one travels.

There is no default group. Each pair's group has a store of its own, which the receiver opens on TransferConfig.host
for an authenticated peer only. The thread that uses a group (torch_group.py) also tears it down, so that no other
thread ever waits for one.
"""

from __future__ import annotations

import datetime
import logging
import queue
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.session.handshake import take
from kv_transfer.transports.channel import Channel, dial
from kv_transfer.transports.peer_channels import LinkThreads, PeerChannels, WritesEnd, listen
from kv_transfer.transports.torch_group import RECEIVER, SENDER, Flight, TorchPair
from kv_transfer.transports.transport import (
    ALL_LAYERS,
    MAX_PUSH_BYTES,
    Arrival,
    Details,
    Landing,
    LayerGroup,
    Peer,
    PushHandle,
    TransportLink,
    notice,
    parse_notice,
)
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId

NAME = "torch"
# The size of each of an end's two staging tensors: a 50 GB/s network moves it in 0.6 ms, NVLink in 0.1.
MAX_NCCL_PUSH_BYTES = 32 << 20

log = logging.getLogger(__name__)


def _max_push_bytes(pages: PageBuffer) -> int:
    return MAX_NCCL_PUSH_BYTES if pages.is_cuda else MAX_PUSH_BYTES


class _Staging:
    """Staging tensors that are used in turn and grow with the pushes. The caller knows that the next one is free."""

    def __init__(self, num_buffers: int, page_bytes: int, device: torch.device) -> None:
        self._page_bytes = page_bytes
        self._device = device
        self._buffers: deque[PageBuffer | None] = deque([None] * num_buffers)

    def next(self, num_pages: int) -> PageBuffer:
        buffer = self._buffers.popleft()
        if buffer is None or buffer.num_pages < num_pages:
            buffer = PageBuffer.staging(num_pages, self._page_bytes, self._device)
        self._buffers.append(buffer)
        return buffer.head(num_pages)


class TorchReceiver:
    """The receiving ends of all pairs: one thread for each connected peer."""

    name = NAME
    is_one_sided = False

    def __init__(self, pages: PageBuffer, config: TransferConfig, landing: Landing) -> None:
        self._pages = pages
        self._config = config
        self._landing = landing
        self._channels = PeerChannels(NAME, config, landing, self._serve, WritesEnd.HERE)

    def offer(self, peer: Peer) -> Details:
        return {**self._channels.offer(peer), "backend": "nccl" if self._pages.is_cuda else "gloo"}

    def forget(self, peer: Peer) -> None:
        self._channels.forget(peer)

    def cut_off(self, epoch: Epoch) -> bool:
        """Returns True: what a peer pushes is written only while the transfer is open here."""
        return self._channels.cut_off(epoch)

    def tear_down(self) -> None:
        """Does nothing: no peer writes on its own."""

    def close(self) -> None:
        self._channels.close()

    def _serve(self, peer: Peer, channel: Channel) -> None:
        group = self._join(channel)
        channel.set_timeout(None)
        self._receive_pushes(peer, channel, group)

    def _join(self, channel: Channel) -> TorchPair:
        host = self._channels.host
        listening = listen(host)
        port = listening.getsockname()[1]
        timeout = datetime.timedelta(seconds=self._config.connect_timeout_s)
        # A listening socket of our own, because TCPStore would listen on every interface.
        store = dist.TCPStore(host, port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())
        prefix = secrets.token_hex(16)
        channel.send([port, prefix])
        return TorchPair(dist.PrefixStore(prefix, store), RECEIVER, self._pages, host, self._config)

    def _receive_pushes(self, peer: Peer, channel: Channel, group: TorchPair) -> None:
        rows = self._landing.rows_of(peer)
        page_bytes = self._pages.page_bytes // rows.num_in_page * rows.num_in_part  # received for each page
        max_pages = max(1, _max_push_bytes(self._pages) // page_bytes)
        staging = _Staging(group.num_buffers, page_bytes, self._pages.device)
        in_flight: deque[tuple[Arrival, PageBuffer, Flight]] = deque()
        while True:
            if in_flight and (len(in_flight) == group.num_buffers or not channel.has_frame()):
                arrival, staged, flight = in_flight.popleft()
                flight.wait()
                with group.copying():
                    landed = self._landing.land(arrival, staged, rows)
                    group.settle()
                channel.send([landed])
                continue
            arrival = parse_notice(channel.receive())
            if arrival.num_pages > max_pages or arrival.key.sender_epoch != peer.epoch:
                raise TransferError(
                    f"push {arrival} from {peer}: more than {max_pages} pages, or another peer's transfer"
                )
            staged = staging.next(arrival.num_pages)
            in_flight.append((arrival, staged, group.start_receive(staged)))


@dataclass(slots=True, eq=False)
class _TorchPush:
    link: TorchLink
    arrival: Arrival
    src_pages: Sequence[PageId]
    landed: bool | None = field(default=None)

    def done(self) -> bool:
        if self.landed is None:
            self.link.check()
            return False
        if not self.landed:
            raise TransferError(f"transfer {self.arrival.key.transfer_id}: the receiver has closed it")
        return True


class TorchLink:
    """The sending end of one pair: a thread that packs and sends, and a thread that reads acknowledgements."""

    takes_layer_groups = gains_from_layer_groups = False
    needs_polling = False

    def __init__(self, pages: PageBuffer, channel: Channel, group: TorchPair, wake: Callable[[], None]) -> None:
        self.max_push_bytes = _max_push_bytes(pages)
        self._pages = pages
        self._channel = channel
        self._wake = wake
        self._error: TransferError | None = None
        self._group = weakref.ref(group)
        self._unsent: queue.SimpleQueue[_TorchPush | None] = queue.SimpleQueue()
        self._unacked: queue.SimpleQueue[_TorchPush] = queue.SimpleQueue()
        self.threads = [
            # Only the thread holds the group, so that the group ends where it is used.
            threading.Thread(target=self._send_pushes, args=(group,), name="kv-send", daemon=True),
            threading.Thread(target=self._read_acks, name="kv-acks", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def push(
        self,
        arrival: Arrival,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> PushHandle:
        if layer_group != ALL_LAYERS:
            raise TransferError("torch pushes whole pages")
        self.check()
        started = _TorchPush(self, arrival, src_pages)  # the receiver knows the destination pages
        self._unsent.put(started)
        return started

    def check(self) -> None:
        if self._error is not None:
            raise TransferError(self._error.message)

    def close(self) -> None:
        self._fail(TransferError(f"{NAME} link is closed"))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = TransferError(f"{NAME} link: {error}")
        if self._pages.is_cuda and (group := self._group()) is not None:
            group.abort()
        self._channel.close()
        self._unsent.put(None)
        self._wake()

    def _send_pushes(self, group: TorchPair) -> None:
        staging = _Staging(group.num_buffers, self._pages.page_bytes, self._pages.device)
        in_flight: deque[Flight] = deque()
        try:
            while (push := self._next_push(in_flight)) is not None and self._error is None:
                if len(in_flight) == group.num_buffers:
                    in_flight.popleft().wait()
                staged = staging.next(len(push.src_pages))
                with group.copying():
                    self._pages.gather(push.src_pages, staged)
                self._unacked.put(push)
                self._channel.send(notice(push.arrival))
                in_flight.append(group.start_send(staged))
        except (RuntimeError, TransferError) as error:  # RuntimeError: the group's
            self._fail(error)
        group.abort()

    def _next_push(self, in_flight: deque[Flight]) -> _TorchPush | None:
        """Returns the next push to send, or None at the end. Blocks until there is one, and ends flights meanwhile.
        Raises RuntimeError.
        """
        while in_flight:
            try:
                return self._unsent.get_nowait()
            except queue.Empty:
                in_flight.popleft().wait()
        return self._unsent.get()

    def _read_acks(self) -> None:
        while True:
            try:
                frame = self._channel.receive()
                if frame not in ([True], [False]):
                    raise TransferError(f"acknowledgement {str(frame)[:80]}: want [true] or [false]")
                self._unacked.get_nowait().landed = bool(frame[0])
                self._wake()
            except (TransferError, queue.Empty) as error:
                self._fail(error)
                return


class TorchSender:
    """Dials receivers. The caller owns the links; this class only keeps their threads, to wait for them."""

    name = NAME

    def __init__(self, pages: PageBuffer, config: TransferConfig, wake: Callable[[], None]) -> None:
        self._pages = pages
        self._config = config
        self._wake = wake
        self._threads = LinkThreads()

    def suits(self, details: Details) -> bool:
        return True

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> TransportLink:
        host, port, token = take(details, "host", str), take(details, "port", int), take(details, "token", bytes)
        backend, own = take(details, "backend", str), "nccl" if self._pages.is_cuda else "gloo"
        if backend != own:
            raise TransferError(
                f"offer.backend: {backend!r}, this end has {own!r}; pools must be on one kind of device"
            )
        channel = dial(host, port, token, self._config.connect_timeout_s)
        try:
            group = self._join(channel, host)
        except (RuntimeError, TransferError) as error:
            channel.close()
            raise TransferError(f"{NAME} group with epoch {receiver_epoch} at {host}:{port}: {error}") from error
        channel.set_timeout(None)
        link = TorchLink(self._pages, channel, group, self._wake)
        self._threads.add(link.threads)
        return link

    def close(self) -> None:
        self._threads.join()

    def _join(self, channel: Channel, host: str) -> TorchPair:
        match channel.receive():
            case [int(port), str(prefix)]:
                timeout = datetime.timedelta(seconds=self._config.connect_timeout_s)
                store = dist.TCPStore(host, port, 2, False, timeout)
                # gloo must listen on the interface that reaches the receiver.
                own_host = channel.own_host()
                return TorchPair(dist.PrefixStore(prefix, store), SENDER, self._pages, own_host, self._config)
            case other:
                raise TransferError(f"greeting {str(other)[:80]}: want [port, prefix]")
