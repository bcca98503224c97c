"""The NIXL wire: one-sided writes over UCX (RDMA, CUDA IPC, or CMA, shared memory and TCP on plain hosts).

The sender writes straight into the receiver's pool, one descriptor a page from lists prepared once, and each write
carries a notification that names what landed. NIXL's progress thread stays off, as it burns a core while idle: the
receiver's thread polls while transfers are open, the sender's while pushes are under way. A push is done when NIXL
says so: then nothing of it is written any more. A closed transfer can still be written until the sender has stopped:
that is what the fence is for. (Over plain TCP, UCX has the receiver's own polling write the bytes: one that wakes after
the sender gave up on it may find some in its socket, hence the receiver's `when_quiet`.)

Owns the agents, the registration of the pool and every handle. Metadata travels in the offer, never over a socket of
its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgpack
import numpy as np

from kv_transfer.handshake import take
from kv_transfer.nixl_agent import Agent
from kv_transfer.own_sockets import drop_at_close, reset, tcp_sockets
from kv_transfer.pages import PageBuffer
from kv_transfer.transport import MAX_PUSH_BYTES, WHOLE, Arrival, Details, Link, Part, Peer, Push, notice, parse_notice
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId

NAME = "nixl"
MAX_REMOTE_PAGES = 1 << 26  # of an offer: bounds the descriptor list that it makes this end build
PROBE_POLL_S = 0.0005
HELLO = "hello"

log = logging.getLogger(__name__)


class NixlReceiver:
    """Lets peers write into the pool, and hears what they wrote."""

    name = NAME
    needs_polling = True

    def __init__(self, pages: PageBuffer, config: TransferConfig) -> None:
        self._pages = pages
        self._agent = Agent(pages, config)
        self._metadata: bytes = self._agent.api.get_agent_metadata()
        self._heard: set[Epoch] = set()

    def offer(self, peer: Peer) -> Details:
        return {
            "metadata": self._metadata,
            "address": self._pages.address,
            "device": self._agent.device,
            "num_pages": self._pages.num_pages,
            "memory": self._agent.memory,
            "ports": self._agent.ports,
        }

    def poll(self) -> list[Arrival]:
        try:
            with self._agent.lock:
                by_agent: dict[str, list[bytes]] = self._agent.api.get_new_notifs()
        except self._agent.errors as error:
            raise TransferError(f"{NAME} notifications: {error}") from error
        arrivals: list[Arrival] = []
        for message in (message for messages in by_agent.values() for message in messages):
            try:
                self._read(message, arrivals)
            except TransferError as error:
                log.warning("a notification was dropped: %s", error)
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
        """Nothing is held for a peer here: it is the peer that connects, and what it still says is late."""

    def close(self) -> None:
        self._agent.close()


def _unpack(message: bytes) -> object:
    try:
        return msgpack.unpackb(message)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"{NAME} notification {message[:40]!r}: no msgpack") from error


class _NixlPush:
    """One posted write. Its handle is released as soon as it is over."""

    __slots__ = ("_handle", "_link")

    def __init__(self, link: NixlLink, handle: Any) -> None:
        self._link = link
        self._handle = handle

    def done(self) -> bool:
        return self._link.is_done(self._handle)


class NixlLink:
    """Writes into one receiver's pool."""

    max_push_bytes = MAX_PUSH_BYTES
    takes_parts = gains_from_parts = False
    needs_polling = True

    def __init__(self, agent: Agent, local: Any, remote_name: str, remote: Any, num_remote_pages: int) -> None:
        self._agent = agent
        self._local = local
        self._remote_name = remote_name
        self._remote = remote
        self._num_remote_pages = num_remote_pages
        self._handles: set[Any] = set()  # of pushes that are not over
        self._error: TransferError | None = None
        self.sockets: frozenset[str] = frozenset()  # of its connections, where they are TCP's

    def push(
        self, arrival: Arrival, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> Push:
        assert part == WHOLE, "this wire does not take parts of pages"
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
        """Cancels what is under way, then disconnects: UCX flushes or discards what it had not sent."""
        if self._error is None:
            self._error = TransferError(f"{NAME} link is closed")
        with self._agent.lock:
            for handle in list(self._handles):
                try:
                    self._release(handle)
                except self._agent.errors:
                    continue  # not cancellable; NIXL keeps it, and disconnecting below ends it
            self._handles.clear()
            if self._remote is not None:
                self._remote.release()
                self._remote = None
                self._agent.api.remove_remote_agent(self._remote_name)
        reset(self.sockets)  # UCX closes them when it is polled next; what the kernel holds must not go out until then

    def probe(self, scratch: Any, deadline_s: float, epoch: Epoch) -> None:
        """Reads one remote page aside: proves the path in both directions. Blocks until `deadline_s`.

        The receiver polls while it expects a peer, which lets UCX finish its own handshake; the hello ends that.
        """
        api, first = self._agent.api, np.zeros(1, dtype=np.int32)
        try:
            with self._agent.lock:
                handle = api.make_prepped_xfer("READ", scratch, first, self._remote, first)
                self._handles.add(handle)
                api.transfer(handle)
            pause = threading.Event()
            while not self.is_done(handle):
                if time.monotonic() > deadline_s:
                    raise TransferError("no answer in time")
                pause.wait(PROBE_POLL_S)  # UCX has nothing to wait on without its progress thread
            with self._agent.lock:
                api.send_notif(self._remote_name, msgpack.packb([HELLO, epoch]))
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
    """Connects to receivers with one agent for all of them."""

    name = NAME

    def __init__(self, pages: PageBuffer, config: TransferConfig, epoch: Epoch) -> None:
        self._pages = pages
        self._config = config
        self._epoch = epoch
        self._agent = Agent(pages, config)
        self._scratch_buffer = PageBuffer.staging(1, pages.page_bytes, pages.device)
        self._agent.register(self._scratch_buffer.tensor)
        self._local = self._prepare_local(pages)
        self._scratch = self._prepare_local(self._scratch_buffer)

    def suits(self, details: Details) -> bool:
        return True

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> Link:
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        agent, page_bytes = self._agent, self._pages.page_bytes
        num_pages, memory = take(details, "num_pages", int) * num_rows, take(details, "memory", str)
        address, device = take(details, "address", int), take(details, "device", int)
        metadata = take(details, "metadata", bytes)
        if not (0 < num_pages <= MAX_REMOTE_PAGES and 0 <= address < 1 << 63 and 0 <= device < 1 << 16):
            raise TransferError(f"offer: {num_pages} pages at {address:#x} on device {device} cannot be")
        if memory != agent.memory:
            raise TransferError(f"offer.memory: {memory!r}, this end has {agent.memory!r}")
        others = {one.number for one in tcp_sockets()}
        try:
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
            raise TransferError(f"{NAME} connection to epoch {receiver_epoch}: {error}") from error
        link = NixlLink(agent, self._local, remote_name, remote, num_pages)
        try:
            link.probe(self._scratch, deadline_s, self._epoch)
            link.sockets = self._find_sockets(details, others)
            drop_at_close(link.sockets)  # else our kernel writes on when this process is gone
        except TransferError:
            link.close()
            raise
        return link

    def _find_sockets(self, details: Details, others: Collection[str]) -> frozenset[str]:
        """Those that UCX has made since there were `others`, whichever end connected."""
        theirs, ours = details.get("ports"), self._agent.ports
        ports = theirs if isinstance(theirs, list) else []
        new = (one for one in tcp_sockets() if one.number not in others)
        return frozenset(one.number for one in new if one.own_port in ours or one.peer_port in ports)

    def close(self) -> None:
        with self._agent.lock:
            self._local.release()
            self._scratch.release()
        self._agent.close()

    def _prepare_local(self, pages: PageBuffer) -> Any:
        agent = self._agent
        try:
            return agent.prepare("NIXL_INIT_AGENT", pages.address, agent.device, pages.num_pages, pages.page_bytes)
        except agent.errors as error:
            raise TransferError(f"{NAME} descriptors: {error}") from error
