"""Sets up logging, limits, memory and signal handling in every process of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys

log = logging.getLogger(__name__)

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 256 << 10
_SWITCH_S = 0.0005
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up_logging(name: str, level: str | None = None) -> None:
    """Sends this process's logs to stderr, each line prefixed with `name`; the level defaults to PENSTOCK_LOG.

    Logs have one line for each transition, never one per token, and never contain a prompt.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{name} {_FORMAT}"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("PENSTOCK_LOG", "WARNING")).upper())


def raise_file_limit() -> int:
    """Raises this process's limit of open files to the maximum, since each connection takes one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.info("open files: raised the limit from %d to %d", soft, hard)
    return hard


def return_freed_memory() -> None:
    """Makes malloc return large blocks to the system as soon as they are freed. It has no effect without glibc.

    By default glibc raises the threshold to the size of the largest block freed so far, up to 32 MiB, and each thread
    of the process would retain the memory of large messages.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def favour_event_loop() -> None:
    """Makes threads yield to the event loop after half a millisecond of Python instead of five.

    The loop releases the interpreter's lock whenever it waits, and gets it back only after every other thread's turn.
    """
    sys.setswitchinterval(_SWITCH_S)


def freeze_heap() -> None:
    """Exempts all objects that this process has now from garbage collection. Call it once the process is ready.

    Modules and models live until the end, and walking them would block the process for tens of milliseconds each time.
    """
    gc.collect()
    gc.freeze()


class Shutdown:
    """Turns signals into events: SIGTERM requests an orderly shutdown, SIGINT or a second SIGTERM an immediate one.

    Must be created on the event loop of the process, whose signal handlers it replaces.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()  # do not wait for requests in flight; implies `requested`
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_term(self) -> None:
        if self.requested.is_set():
            self.immediate.set()
        self.requested.set()

    def _on_interrupt(self) -> None:
        self.requested.set()
        self.immediate.set()
