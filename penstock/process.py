"""Sets up what every process of a deployment needs, once: logging, and an answer to the signals that end it."""

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

    Logs have one line for each event: transitions and not tokens, and never a prompt.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{name} {_FORMAT}"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("PENSTOCK_LOG", "WARNING")).upper())


def raise_file_limit() -> int:
    """Lets this process open as many files as it may, since each connection is one. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.info("open files: raised the limit from %d to %d", soft, hard)
    return hard


def return_freed_memory() -> None:
    """Has large blocks returned to the system as soon as they are freed. Without glibc it has no effect.

    glibc raises the size from which it does so to that of the largest block freed yet, up to 32 MiB. Messages of
    megabytes would stay with the process that way, for each of its threads.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def favour_event_loop() -> None:
    """Has threads of this process give way to its event loop after half a millisecond of Python each, not after five.

    The loop gives up the interpreter's lock whenever it waits, and gets it back after every other thread's turn.
    """
    sys.setswitchinterval(_SWITCH_S)


def freeze_heap() -> None:
    """Exempts what this process holds now from garbage collection. Call it once it is ready.

    Modules and models stay to the end; walking them would stop everything else for tens of milliseconds each time.
    """
    gc.collect()
    gc.freeze()


class Shutdown:
    """Turns signals into events: SIGTERM asks for an orderly end, SIGINT or a second SIGTERM for an immediate one.

    Must be created on the event loop of the process, whose signal handlers it replaces.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()  # ends without waiting for requests in flight; implies `requested`
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
