"""Runs the receiving process of the transfer benchmarks: a pool with receivers or bare transports, driven by a pipe."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from engine.cache.kv_layout import KVLayout
from engine.cache.pool_memory import allocate_pool
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import WHOLE_PAGE, PageRows
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.transports.nixl import NixlReceiver
from kv_transfer.transports.torch_group import RECEIVER, TorchPair
from kv_transfer.transports.transport import Arrival, Peer
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey, WorkerId

SENDER_EPOCH, RECEIVER_EPOCH = Epoch(1), Epoch(2)
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
CPU = torch.device("cpu")
_PEER = WorkerId("prefill")


def layout(page_bytes: int) -> KVLayout:
    """Returns a layout of pages of `page_bytes`, whose inner structure does not matter here."""
    return KVLayout(1, 1, 1, page_bytes // 4, "bfloat16", "bench")


class PeerProcess:
    """Starts the receiving process and calls into it; every answer has a deadline."""

    def __init__(self, pool_bytes: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pool_bytes, torch.device(device)), daemon=True)
        self._process.start()

    def send(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def receive(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError("the receiving process does not answer")
        return self._pipe.recv()

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.receive()

    def open_end(self, kind: str, *arguments: Any) -> RemoteEnd:
        """Makes one of the receiving ends below from `arguments`."""
        number, offer = self.call(kind, *arguments)
        return RemoteEnd(self, number, offer)

    def expect_ready(self) -> None:
        if self.receive() != "ready":
            raise RuntimeError("the receiving process did not start")

    def stop(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)


class RemoteEnd:
    """A receiving end in the other process; several may be open at a time."""

    def __init__(self, process: PeerProcess, number: int, offer: Any) -> None:
        self._process = process
        self._number = number
        self.offer = offer

    def send(self, name: str, *arguments: Any) -> None:
        self._process.send(name, self._number, *arguments)

    def receive(self) -> Any:
        return self._process.receive()

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.receive()


class _PagedReceiver:
    """A receiver as a decode worker has it."""

    def __init__(self, pool: torch.Tensor, wire: str) -> None:
        self._landed: dict[TransferKey, int] = {}
        self._last_s = 0.0
        self._changed = threading.Condition()
        config = TransferConfig.model_validate({"transport": wire, "timeout_s": TIMEOUT_S})
        self._end = TransferReceiver(
            pool, layout(pool.shape[1]), RECEIVER_EPOCH, config, self._arrived, lambda key, error: None
        )

    def offer(self) -> bytes:
        return self._end.offer(_PEER, SENDER_EPOCH)

    def open(self, key: TransferKey, pages: list[PageId]) -> None:
        self._end.open(key, pages)

    def landed(self, key: TransferKey, num_pages: int) -> float:
        """Waits for all pages and returns the time at which the last was reported."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._landed.get(key) == num_pages, TIMEOUT_S):
                raise TimeoutError(f"{self._landed.get(key)} of {num_pages} pages")
        self._end.close(key)
        return self._last_s

    def close(self) -> None:
        self._end.shutdown()

    def _arrived(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        with self._changed:
            self._landed[key] = self._landed.get(key, 0) + num_pages
            self._last_s = time.monotonic()
            self._changed.notify_all()


class _NoLanding:
    """Implements `transport.Landing` for a transport that stages nothing."""

    def land(self, arrival: Arrival, staged: PageBuffer, rows: PageRows) -> bool:
        return False

    def landed(self, arrival: Arrival) -> None: ...

    def rows_of(self, peer: Peer) -> PageRows:
        return WHOLE_PAGE

    def lost(self, peer: Peer, error: TransferError) -> None: ...


class _BareNixl:
    """The bare NIXL transport, polled without a pause."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._transport = NixlReceiver(PageBuffer(pool), TransferConfig(transport="nixl"), _NoLanding())
        self._num_pages = 0

    def offer(self) -> Any:
        return self._transport.offer(Peer(_PEER, SENDER_EPOCH))

    def await_sender(self) -> None:
        """Waits until the sender has connected."""
        self._until(lambda: bool(self._transport.poll() or self._transport.heard_from()))

    def poll(self, num_pages: int) -> float:
        """Waits until that many pages have arrived and returns the time."""
        self._until(lambda: self._count(num_pages))
        return time.monotonic()

    def _count(self, num_pages: int) -> bool:
        self._num_pages += sum(arrival.num_pages for arrival in self._transport.poll())
        if self._num_pages < num_pages:
            return False
        self._num_pages = 0
        return True

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the sender is silent")

    def close(self) -> None:
        self._transport.close()


class _BareGloo:
    """A gloo send and receive of contiguous bytes."""

    def __init__(self, pool: torch.Tensor, port: int) -> None:
        store = dist.TCPStore(HOST, port, 2, False, datetime.timedelta(seconds=TIMEOUT_S))
        self._pages = PageBuffer(pool)
        self._group = TorchPair(store, RECEIVER, self._pages, HOST, TransferConfig(timeout_s=TIMEOUT_S))

    def offer(self) -> None:
        """Does nothing: the receiver joins the sender's store."""

    def receive(self) -> float:
        self._group.start_receive(self._pages).wait()
        return time.monotonic()

    def close(self) -> None:
        self._group.abort()


def _serve(pipe: Connection, pool_bytes: int, device: torch.device) -> None:
    torch.set_num_threads(1)
    memory = allocate_pool((pool_bytes,), torch.uint8, CPU).fill_(0)  # touches every page of it
    ends: dict[int, Any] = {}
    kinds: dict[str, Callable[..., Any]] = {"paged": _PagedReceiver, "bare-nixl": _BareNixl, "bare-gloo": _BareGloo}
    pipe.send("ready")
    for number in itertools.count():
        name, arguments = pipe.recv()
        if name in kinds:
            num_pages, page_bytes, *rest = arguments
            if device.type == "cpu":
                pool = memory[: num_pages * page_bytes].view(num_pages, page_bytes)
            else:  # allocated as an engine does it
                pool = allocate_pool((num_pages, page_bytes), torch.uint8, device)
            ends[number] = kinds[name](pool, *rest)
            pipe.send((number, ends[number].offer()))
            continue
        end, *rest = arguments
        pipe.send(getattr(ends[end], name)(*rest))
        if name == "close":
            del ends[end]
