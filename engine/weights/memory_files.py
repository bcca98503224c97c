"""Manages in-memory files that processes of one user share on a host. They are found by a label: the first process
fills a file, others map it.

A memfd has no path: it lives as long as a process maps it, and nothing is left behind however its users end. It is
found by its label among the open files of this user's processes. The process that fills a file holds a lock on it,
which ends with the process; a finished file is sealed, so that no process can change what others compute with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FILL_TIMEOUT_S = 120.0  # how long another process may take to fill a file before the caller goes on without it
SEARCH_TIMEOUT_S = 10.0  # how long another process may search; that takes milliseconds, unless it is stopped
_MAX_LABEL = 200  # a memfd's name has 249 characters
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("SEAL", "SHRINK", "GROW", "WRITE"))


class MemoryFile:
    """Owns the descriptor until `detach`."""

    def __init__(self, fd: int, *, is_mine: bool) -> None:
        self.fd = fd
        self.is_mine = is_mine  # to be filled by this process

    def finish(self) -> None:
        """Seals the file with its final size and content, and lets other processes use it."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def detach(self) -> int:
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.detach())


def open_memory_file(label: str, lock_path: Path) -> MemoryFile | None:
    """Returns the finished file with this label, or a new one for the caller to fill. Returns None if the system has no
    memfd, or if another process takes too long to fill the file. Blocks until then.

    `lock_path` is any file that all sharing processes can open; its lock keeps two of them from both creating a file.
    """
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").exists() or not _SEALS:
        return None
    assert len(label) <= _MAX_LABEL
    while True:
        try:
            with _locked(lock_path):
                found = _find(label)
                if found is None:
                    return _create(label)
        except OSError:
            return None  # a file system without locks, no memory, or a process that does not release the lock
        if _is_finished(found):
            return MemoryFile(found, is_mine=False)
        is_over = _lock_within(FILL_TIMEOUT_S, found, fcntl.LOCK_SH)
        if _is_finished(found):
            return MemoryFile(found, is_mine=False)
        os.close(found)
        if not is_over:
            return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock for a search of the processes. Raises OSError, or TimeoutError if the lock stays taken."""
    with path.open("rb") as stream:
        if not _lock_within(SEARCH_TIMEOUT_S, stream.fileno(), fcntl.LOCK_EX):
            raise TimeoutError(f"{path} has been locked for {SEARCH_TIMEOUT_S:g} s")
        yield


def _create(label: str) -> MemoryFile:
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return MemoryFile(fd, is_mine=True)


def _find(label: str) -> int | None:
    """Returns a new descriptor of the file that a process is filling or has filled, skipping files left half filled."""
    link, me = f"/memfd:{label} (deleted)", os.getuid()
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if process.stat().st_uid != me:
                continue
            for name in os.listdir(f"/proc/{process.name}/fd"):
                path = f"/proc/{process.name}/fd/{name}"
                with contextlib.suppress(OSError):
                    if os.readlink(path) == link:
                        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        if not _try_lock(fd) or _is_finished(fd):  # in this order: it may be finished in between
                            return fd
                        os.close(fd)
    return None


def _is_finished(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def _try_lock(fd: int) -> bool:
    """Takes a shared lock without waiting; False while another process fills the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_within(timeout_s: float, fd: int, kind: int) -> bool:
    """Waits for the lock; returns False after `timeout_s`. Raises OSError if the file system has no locks. The
    kernel does not wait for a lock with a deadline, so a thread does."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass  # another process holds it
    over = threading.Event()
    own = os.dup(fd)  # shares the lock, which is released when both descriptors are closed

    def wait() -> None:
        with os.fdopen(own, "rb") as stream:
            fcntl.flock(stream, kind)
        over.set()

    threading.Thread(target=wait, name="shared weights", daemon=True).start()
    return over.wait(timeout_s)
