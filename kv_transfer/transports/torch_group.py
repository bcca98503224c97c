"""Wraps a process group of two ranks: gloo between CPU pools, NCCL between CUDA pools.

Used by torch_dist.py. Every call has a time limit. Gloo enforces it itself. NCCL's calls return before anything has
moved, so our own watchdog aborts the group; NCCL's watchdog would end the process. NCCL moves bytes on a separate
stream, so that one push is packed while another is sent.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kv_transfer.layout.pages import PageBuffer
from penstock.config import TransferConfig

RECEIVER, SENDER = 0, 1  # ranks
NEVER = datetime.timedelta(days=365)
_HIGH_PRIORITY = -1  # stream priority: its copies go before waiting blocks of a step


class Watchdog:
    """Calls `on_late` once, on its own thread, if a call is not over within the time-out. Safe from any thread."""

    def __init__(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._changed = threading.Condition()
        self._due_s: deque[float] = deque()  # deadlines of calls in progress, which end in order
        self._stopped = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        with self._changed:
            self._due_s.append(time.monotonic() + self._timeout_s)
            self._changed.notify()
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._watch, name="kv-watchdog", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends the oldest call."""
        with self._changed:
            if self._due_s:
                self._due_s.popleft()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                left_s = self._due_s[0] - time.monotonic() if self._due_s else None
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            else:
                return
        self._on_late()


class Flight:
    """A send or receive that was started. Flights of a pair are waited for in the order of their starts."""

    __slots__ = ("_event", "_pair")

    def __init__(self, pair: TorchPair, event: torch.cuda.Event | None) -> None:
        """`event` occurs when the flight is complete; None if it already is."""
        self._pair = pair
        self._event = event

    def wait(self) -> None:
        """Blocks until the staging buffer may be reused or read, for at most the time-out. Raises RuntimeError."""
        if self._event is not None:
            self._event.synchronize()
            self._pair.end_call()


class TorchPair:
    """A two-rank process group that belongs to one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, pages: PageBuffer, host: str, config: TransferConfig) -> None:
        self._peer = SENDER if rank == RECEIVER else RECEIVER
        self._timeout = datetime.timedelta(seconds=config.timeout_s)
        self._aborted = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._wire: torch.cuda.Stream | None = None
        late = weakref.WeakMethod(self.abort)  # the pair ends with the thread that uses it
        self._watchdog = Watchdog(config.timeout_s, lambda: _call(late()))
        weakref.finalize(self, self._watchdog.stop)
        store.set_timeout(datetime.timedelta(seconds=config.connect_timeout_s))
        if pages.is_cuda:
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # otherwise a lost peer ends this process
            self._stream = torch.cuda.Stream(pages.device, priority=_HIGH_PRIORITY)
            self._wire = torch.cuda.Stream(pages.device)  # runs nothing: its events show what NCCL's stream has done
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER  # for NCCL's watchdog; ours is `_watchdog`
            options.is_high_priority_stream = True
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = self._timeout
            options._threads = 1
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    @property
    def num_buffers(self) -> int:
        """The staging buffers with which an end keeps its wire busy: NCCL's calls return at once, gloo's do not."""
        return 1 if self._stream is None else 2

    def start_send(self, staged: PageBuffer) -> Flight:
        """Sends `staged` behind the copies made so far. Raises RuntimeError."""
        return self._start(self._group.send, staged)

    def start_receive(self, staged: PageBuffer) -> Flight:
        """Fills `staged` behind the copies made so far. Raises RuntimeError."""
        return self._start(self._group.recv, staged)

    def _start(self, call: Callable[..., Any], staged: PageBuffer) -> Flight:
        if self._stream is None or self._wire is None:
            call([staged.tensor], self._peer, 0).wait(self._timeout)
            return Flight(self, None)
        self._watchdog.begin()  # the first call also connects, which may block
        with self.copying():
            work = call([staged.tensor], self._peer, 0)
        with torch.cuda.stream(self._wire):
            work.wait()  # makes the stream wait; with a time-out NCCL would poll once a millisecond
        return Flight(self, self._wire.record_event())

    def end_call(self) -> None:
        """Raises RuntimeError if the call was aborted."""
        self._watchdog.end()
        if self._aborted.is_set():
            raise RuntimeError("the group was aborted: its peer is gone, or was silent for too long")

    def copying(self) -> torch.cuda.StreamContext:
        """Returns a context in which copies run on the group's own stream, beside the engine's."""
        return torch.cuda.stream(self._stream)  # type: ignore[arg-type]  # None: no effect

    def settle(self) -> None:
        """Blocks until the copies of this group's stream are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def abort(self) -> None:
        """Frees threads that hang in NCCL; gloo's pairs die with the group. Safe from any thread; never blocks."""
        if self._stream is not None and not self._aborted.is_set():
            self._aborted.set()
            threading.Thread(target=self._group.abort, name="kv-abort", daemon=True).start()


def _call(call: Callable[[], None] | None) -> None:
    if call is not None:
        call()
