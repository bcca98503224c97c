"""Implements the NIXL transport: one-sided writes over UCX (RDMA between hosts; CMA, CUDA IPC or RDMA within one).

The sender writes straight into the receiver's pool, with one descriptor per page from lists that are prepared once, and
each write carries a notification that names the pages. NIXL's progress thread stays off, because it keeps a core busy
while idle: the receiver's thread polls while transfers are open, the sender's while pushes are in flight. A push is
done when NIXL says so; it writes nothing after that. A sender may write into a closed transfer until it has stopped;
the fence protects against that. Peers connect only where the sender moves the bytes itself (nixl_agent.py).

Owns the agents, the registration of the pool, and every handle. The metadata that lets a sender write goes over a
`Channel`, and only to a sender that has presented the token of its offer, so the receiver knows which incarnations can
write. The sender closes its channel after its last write. On one host, where the sender's process itself writes (CMA),
the end of the channel proves that its writes have ended. Over RDMA only the end of the receiver's agent does
(`tear_down`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import torch

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.session.handshake import take
from kv_transfer.transports.channel import Channel, ChannelClosed, dial
from kv_transfer.transports.mapped.ends import boot_id
from kv_transfer.transports.nixl_agent import NixlAgent
from kv_transfer.transports.peer_channels import PeerChannels, WritesEnd
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

NAME = "nixl"
MAX_REMOTE_PAGES = 1 << 26  # limit of an offer, to bound the descriptor list built for it
PROBE_POLL_S = 0.0005
PROBE_BYTES = 64  # random bytes next to the pool that a sender reads and compares when it connects
NUM_PATTERNS = 256  # connections that a sender opens at once
HELLO = "hello"
METADATA_PIECE_BYTES = 32 << 10  # in a frame; metadata has 0.5 KB here, tens with many RDMA interfaces
MAX_METADATA_BYTES = 1 << 20
PACKET_LIFETIME_S = 1.0  # InfiniBand: 4.096 us * 2^18, the most that switches are commonly set to

log = logging.getLogger(__name__)


class NixlReceiver:
    """Lets peers write into the pool, and reports what they wrote."""

    name = NAME
    is_one_sided = True

    def __init__(self, pages: PageBuffer, config: TransferConfig, landing: Landing) -> None:
        self._pages = pages
        self._config = config
        self._pattern = secrets.token_bytes(PROBE_BYTES)
        self._probe = PageBuffer.staging(1, PROBE_BYTES, pages.device)
        self._probe.tensor.copy_(torch.frombuffer(bytearray(self._pattern), dtype=torch.uint8))
        self._agent = self._open_agent()
        self._metadata: bytes = self._agent.api.get_agent_metadata()
        self._granting = threading.Lock()  # held while the metadata is sent or replaced
        self.stray_s = PACKET_LIFETIME_S if self._agent.uses_rdma else 0.0
        self._heard: set[Epoch] = set()
        writes_end = WritesEnd.WITH_MEMORY if self._agent.uses_rdma else WritesEnd.WITH_CHANNEL
        self._channels = PeerChannels(NAME, config, landing, self._serve, writes_end)

    def _open_agent(self) -> NixlAgent:
        agent = NixlAgent(self._pages, self._config)
        try:
            agent.register(self._probe.tensor)
        except agent.errors as error:
            agent.close()
            raise TransferError(f"{NAME} agent: {error}{agent.advice}") from error
        return agent

    def offer(self, peer: Peer) -> Details:
        return {
            **self._channels.offer(peer),
            "probe_address": self._probe.address,
            "probe_pattern": self._pattern,
            "address": self._pages.address,
            "device": self._agent.device,
            "num_pages": self._pages.num_pages,
            "memory": self._agent.memory,
            "rdma": self._agent.uses_rdma,
            "host_identity": host_identity(),
        }

    def _serve(self, peer: Peer, channel: Channel) -> None:
        """Lets the peer write until it disconnects. A disconnected peer is not lost yet: its notifications may still
        wait to be polled.
        """
        with self._granting:
            for first in range(0, len(self._metadata), METADATA_PIECE_BYTES):
                piece = self._metadata[first : first + METADATA_PIECE_BYTES]
                channel.send([piece, first + METADATA_PIECE_BYTES >= len(self._metadata)])
        channel.set_timeout(None)
        with contextlib.suppress(ChannelClosed):
            raise TransferError(f"unexpected frame {str(channel.receive())[:80]}")

    def poll(self) -> list[Arrival]:
        agent = self._agent
        try:
            with agent.lock:
                if agent.api is None:
                    return []  # it was replaced
                by_agent: dict[str, list[bytes]] = agent.api.get_new_notifs()
        except agent.errors as error:
            raise TransferError(f"{NAME} notifications: {error}") from error
        arrivals: list[Arrival] = []
        for message in (message for messages in by_agent.values() for message in messages):
            try:
                self._read(message, arrivals)
            except TransferError as error:
                log.warning("dropped a notification: %s", error)
        return arrivals

    def _read(self, message: bytes, arrivals: list[Arrival]) -> None:
        match _unpack(message):
            case [str(word), int(epoch)] if word == HELLO:
                self._heard.add(Epoch(epoch))
            case data:
                arrival = parse_notice(data)
                self._heard.add(arrival.key.sender_epoch)
                arrivals.append(arrival)

    def heard_from(self) -> frozenset[Epoch]:
        heard, self._heard = frozenset(self._heard), set()
        return heard

    def forget(self, peer: Peer) -> None:
        self._channels.forget(peer)

    def cut_off(self, epoch: Epoch) -> bool:
        return self._channels.cut_off(epoch)

    def tear_down(self) -> None:
        """Over RDMA, replaces the agent. The old one's queue pairs and memory keys are gone, so this host's adapter
        drops whatever a peer still sends with them. Live peers fail once and reconnect.
        """
        if not self._agent.uses_rdma:
            return  # a peer on this host is gone once its channel has ended
        with self._granting:
            agent = self._open_agent()
            old, self._agent, self._metadata = self._agent, agent, agent.api.get_agent_metadata()
            try:
                old.close()
            except old.errors as error:
                raise TransferError(f"{NAME}: the pool's memory cannot be withdrawn: {error}") from error
            self._channels.on_memory_withdrawn()

    def close(self) -> None:
        self._channels.close()
        self._agent.close()


def _receive_metadata(channel: Channel) -> bytes:
    """Blocks for at most the channel's time-out, for each piece. Raises TransferError."""
    metadata = bytearray()
    while len(metadata) <= MAX_METADATA_BYTES:
        match channel.receive():
            case [bytes(piece), bool(is_last)]:
                metadata += piece
                if is_last:
                    return bytes(metadata)
            case other:
                raise TransferError(f"greeting {str(other)[:80]}: want [metadata, whether it ends]")
    raise TransferError(f"greeting: more than {MAX_METADATA_BYTES} bytes of metadata")


def _unpack(message: bytes) -> object:
    try:
        return msgpack.unpackb(message)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"{NAME} notification {message[:40]!r}: no msgpack") from error


def host_identity() -> list[str]:
    """Returns what processes must share for CMA to connect them: the boot id and both namespaces."""
    return [boot_id(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))]


class _NixlPush:
    """A posted write. Its handle is released as soon as the write is over."""

    __slots__ = ("_handle", "_link")

    def __init__(self, link: NixlLink, handle: Any) -> None:
        self._link = link
        self._handle = handle

    def done(self) -> bool:
        return self._link.is_done(self._handle)


class NixlLink:
    """Writes into one receiver's pool."""

    max_push_bytes = MAX_PUSH_BYTES
    takes_layer_groups = gains_from_layer_groups = False
    needs_polling = True

    def __init__(
        self,
        agent: NixlAgent,
        channel: Channel,
        wake: Callable[[], None],
        local: Any,
        remote_name: str,
        remote: Any,
        num_remote_pages: int,
    ) -> None:
        self._agent = agent
        self._channel = channel
        self._wake = wake
        self._local = local
        self._remote_name = remote_name
        self._remote = remote
        self._num_remote_pages = num_remote_pages
        self._handles: set[Any] = set()  # handles of pushes in flight
        self._error: TransferError | None = None
        threading.Thread(target=self._watch, name="kv-watch", daemon=True).start()

    def _watch(self) -> None:
        """Fails the link once the receiver hangs up: it sends nothing more after its metadata."""
        with contextlib.suppress(TransferError):
            self._channel.receive()
        if self._error is None:
            self._error = TransferError(f"{NAME} link: the receiver has ended the connection")
        self._wake()

    def push(
        self,
        arrival: Arrival,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> PushHandle:
        if layer_group != ALL_LAYERS:
            raise TransferError("NIXL pushes whole pages")
        self.check()
        if max(dst_pages) >= self._num_remote_pages:
            raise TransferError(f"destination page {max(dst_pages)}: the receiver has {self._num_remote_pages}")
        src_P, dst_P = np.array(src_pages, dtype=np.int32), np.array(dst_pages, dtype=np.int32)
        api = self._agent.api
        try:
            with self._agent.lock:
                note = msgpack.packb(notice(arrival))
                handle = api.make_prepped_xfer("WRITE", self._local, src_P, self._remote, dst_P, note)
                self._handles.add(handle)
                if api.transfer(handle) == "ERR":
                    raise TransferError("the write was not accepted")
        except self._agent.errors as error:
            raise self._fail(error) from error
        return _NixlPush(self, handle)

    def is_done(self, handle: Any) -> bool:
        self.check()
        try:
            with self._agent.lock:
                state = self._agent.api.check_xfer_state(handle)
                if state == "PROC":
                    return False
                if state == "ERR":
                    raise TransferError("a write failed")
                self._release(handle)
        except self._agent.errors as error:
            raise self._fail(error) from error
        return True

    def check(self) -> None:
        if self._error is not None:
            raise TransferError(self._error.message)

    def close(self) -> None:
        """Cancels pushes in flight, then disconnects: UCX flushes or discards what it has not sent. The channel is
        closed last, because its end says that all writes have ended.
        """
        if self._error is None:
            self._error = TransferError(f"{NAME} link is closed")
        with self._agent.lock:
            for handle in list(self._handles):
                try:
                    self._release(handle)
                except self._agent.errors:
                    continue  # it cannot be cancelled; the disconnect below ends it
            self._handles.clear()
            if self._remote is not None:
                self._remote.release()
                self._remote = None
                self._agent.api.remove_remote_agent(self._remote_name)
        self._channel.close()

    def read_first(self, local: Any, row: int, remote: Any, deadline_s: float) -> None:
        """Reads the first remote descriptor into local descriptor `row`, which proves the path both ways. Blocks until
        `deadline_s`; the receiver polls while it expects a peer, so that UCX can finish its handshake. Raises
        TransferError."""
        api, pause = self._agent.api, threading.Event()
        try:
            with self._agent.lock:
                rows, first = np.array([row], dtype=np.int32), np.zeros(1, dtype=np.int32)
                handle = api.make_prepped_xfer("READ", local, rows, remote, first)
                self._handles.add(handle)
                api.transfer(handle)
            while not self.is_done(handle):
                if time.monotonic() > deadline_s:
                    raise TransferError("no answer in time")
                pause.wait(PROBE_POLL_S)  # without its progress thread UCX offers nothing to wait on
        except self._agent.errors as error:
            raise self._fail(error) from error

    def greet(self, epoch: Epoch) -> None:
        """Ends the receiver's polling for this peer. Raises TransferError."""
        try:
            with self._agent.lock:
                self._agent.api.send_notif(self._remote_name, msgpack.packb([HELLO, epoch]))
        except self._agent.errors as error:
            raise self._fail(error) from error

    def _release(self, handle: Any) -> None:
        handle.release()
        self._handles.discard(handle)

    def _fail(self, error: BaseException) -> TransferError:
        if self._error is None:
            self._error = TransferError(f"{NAME} link: {error}")
        return TransferError(self._error.message)


class NixlSender:
    """Connects to receivers, and uses one agent for all of them."""

    name = NAME

    def __init__(self, pages: PageBuffer, config: TransferConfig, epoch: Epoch, wake: Callable[[], None]) -> None:
        self._pages = pages
        self._config = config
        self._epoch = epoch
        self._wake = wake
        self._agent = NixlAgent(pages, config)
        self._scratch_buffer = PageBuffer.staging(1, pages.page_bytes, pages.device)
        self._agent.register(self._scratch_buffer.tensor)
        self._local = self._prepare_local(pages)
        self._scratch = self._prepare_local(self._scratch_buffer)
        self._patterns_buffer = PageBuffer.staging(NUM_PATTERNS, PROBE_BYTES, pages.device)
        self._agent.register(self._patterns_buffer.tensor)
        self._patterns = self._prepare_local(self._patterns_buffer)
        self._next_pattern = itertools.count()

    def suits(self, details: Details) -> bool:
        """Returns whether both ends have RDMA or share a host; otherwise UCX would use TCP."""
        is_rdma = self._agent.uses_rdma and details.get("rdma") is True
        return is_rdma or details.get("host_identity") == host_identity()

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> TransportLink:
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        agent, page_bytes = self._agent, self._pages.page_bytes
        num_pages, memory = take(details, "num_pages", int) * num_rows, take(details, "memory", str)
        address, device = take(details, "address", int), take(details, "device", int)
        host, port, token = take(details, "host", str), take(details, "port", int), take(details, "token", bytes)
        if not (0 < num_pages <= MAX_REMOTE_PAGES and 0 <= address < 1 << 63 and 0 <= device < 1 << 16):
            raise TransferError(f"offer: {num_pages} pages at {address:#x} on device {device} is out of range")
        if memory != agent.memory:
            raise TransferError(f"offer.memory: {memory!r}, this end has {agent.memory!r}")
        if not self.suits(details):
            raise TransferError("the receiver is on another host, and RDMA is not available at both ends")
        channel = dial(host, port, token, self._config.connect_timeout_s)
        try:
            metadata = _receive_metadata(channel)
            with agent.lock:
                remote_name = agent.api.add_remote_agent(metadata)
                if isinstance(remote_name, bytes):
                    remote_name = remote_name.decode()
                try:
                    remote = agent.prepare(remote_name, address, device, num_pages, page_bytes)
                except agent.errors:
                    agent.api.remove_remote_agent(remote_name)
                    raise
        except agent.errors as error:
            channel.close()
            raise TransferError(f"{NAME} connection to epoch {receiver_epoch}: {error}") from error
        channel.set_timeout(None)
        link = NixlLink(agent, channel, self._wake, self._local, remote_name, remote, num_pages)
        try:
            link.read_first(self._scratch, 0, remote, deadline_s)
            self._compare_probe(link, remote_name, details, deadline_s)
            link.greet(self._epoch)
        except TransferError as error:
            link.close()
            raise TransferError(f"{error}{agent.advice}") from error
        return link

    def _compare_probe(self, link: NixlLink, remote_name: str, details: Details, deadline_s: float) -> None:
        """Reads bytes that both ends know, because UCX may report success without moving any if it mistakes the kind of
        memory. Blocks until `deadline_s`. Raises TransferError.
        """
        agent, address = self._agent, take(details, "probe_address", int)
        if not 0 <= address < 1 << 63:
            raise TransferError(f"offer.probe_address: {address:#x} is out of range")
        slot = next(self._next_pattern) % NUM_PATTERNS  # several links may connect at once
        found = self._patterns_buffer.tensor[slot]
        found.zero_()
        found.cpu()  # waits until it is zero
        try:
            with agent.lock:
                probe = agent.prepare(remote_name, address, take(details, "device", int), 1, PROBE_BYTES)
        except agent.errors as error:
            raise TransferError(f"{NAME} probe: {error}") from error
        try:
            link.read_first(self._patterns, slot, probe, deadline_s)
        finally:
            with agent.lock:
                probe.release()
        if bytes(found.tolist()) != take(details, "probe_pattern", bytes):
            raise TransferError(f"{NAME} reports that {agent.memory} memory was read, but the bytes have not arrived")

    def close(self) -> None:
        with self._agent.lock:
            self._local.release()
            self._scratch.release()
            self._patterns.release()
        self._agent.close()

    def _prepare_local(self, pages: PageBuffer) -> Any:
        agent = self._agent
        try:
            return agent.prepare("NIXL_INIT_AGENT", pages.address, agent.device, pages.num_pages, pages.page_bytes)
        except agent.errors as error:
            raise TransferError(f"{NAME} descriptors: {error}") from error
