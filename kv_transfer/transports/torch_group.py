"""A process group of two ranks: gloo between CPU pools, NCCL between CUDA pools.

Used by torch_dist.py. Calls that never end are bounded by time: gloo does it itself. NCCL's calls return before
anything has moved, so a thread of ours aborts the group; NCCL's own watchdog would end the process.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from kv_transfer.layout.pages import PageBuffer
from penstock.config import TransferConfig

RECEIVER, SENDER = 0, 1  # ranks
NEVER = datetime.timedelta(days=365)


class TorchPair:
    """A two-rank process group that belongs to one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, pages: PageBuffer, host: str, config: TransferConfig) -> None:
        self._peer = SENDER if rank == RECEIVER else RECEIVER
        self._timeout = datetime.timedelta(seconds=config.timeout_s)
        self._aborted = threading.Event()
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None
        store.set_timeout(datetime.timedelta(seconds=config.connect_timeout_s))
        if pages.is_cuda:
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # otherwise a lost peer ends this process
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER  # for NCCL's watchdog; ours is `_watched`
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = self._timeout
            options._threads = 1
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, staged: PageBuffer) -> None:
        """Sends `staged`. Blocks until it may be reused. Raises RuntimeError."""
        with self._watched():
            self._wait(self._group.send([staged.tensor], self._peer, 0))

    def receive(self, staged: PageBuffer) -> None:
        """Fills `staged`. Blocks until it is full. Raises RuntimeError."""
        with self._watched():
            self._wait(self._group.recv([staged.tensor], self._peer, 0))

    def _wait(self, work: Any) -> None:
        if self._stream is None:
            work.wait(self._timeout)
        else:
            work.wait()  # makes the stream wait; with a time-out NCCL would poll once a millisecond

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Blocks at its end until what it started is complete, for at most the time-out. Raises RuntimeError."""
        if self._stream is None:
            yield  # gloo has completed it or raised
            return
        watchdog = threading.Timer(self._timeout.total_seconds(), self.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            with self.copying():
                yield
            self.settle()
        finally:
            watchdog.cancel()
        if self._aborted.is_set():
            raise RuntimeError("the group was aborted: its peer is gone, or was silent for too long")

    def copying(self) -> torch.cuda.StreamContext:
        """Runs copies inside it on the group's own stream, beside the engine's."""
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
