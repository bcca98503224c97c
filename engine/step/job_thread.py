"""Runs jobs on one thread, in order. A GPU engine keeps one such thread for its lifetime.

Libraries keep workspaces, handles and the current device for each thread. CUDA graphs are captured over such
workspaces, so the thread that captured them must outlive them, and steps are launched on that thread too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from penstock.errors import InternalError

_Job = Callable[[], None]
_ALIVE_CHECK_S = 1.0  # how often a waiting caller checks that the thread is alive

ResultT = TypeVar("ResultT")


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of this thread: kernels and libraries launch work there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class JobThread:
    """Runs jobs in order. Safe from any thread. Jobs raise nothing."""

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        """`device` becomes the thread's current device, if it is a GPU."""
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def post(self, job: _Job) -> None:
        """Runs a job after those given before. Never blocks."""
        self._jobs.put(job)

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Runs a call after the jobs given before, and returns its result. Blocks; raises what the call raises."""
        results: list[ResultT] = []
        errors: list[BaseException] = []

        def job() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        self.post(job)
        self.drain()
        if errors:
            raise errors[0]
        if not results:
            raise InternalError("the thread that launches work on the device has ended; the worker's log says why")
        return results[0]

    def drain(self) -> None:
        """Blocks until every given job is done, or the thread has ended."""
        drained = threading.Event()
        self.post(drained.set)
        while not drained.wait(_ALIVE_CHECK_S) and self._thread.is_alive():
            pass

    def close(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread after the jobs given before. Blocks; False if it did not end in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        if self._device is not None:
            use_device(self._device)
        while (job := self._jobs.get()) is not None:
            job()
