"""Files in memory that processes of one user on one host share by what is in them: the first one fills, others map.

A memfd has no name: it lives as long as anybody maps it, and nothing is left however its users end. It is found by its
label among the open files of this user's processes. Whoever fills one holds a lock on it, which ends with its process;
a finished one is sealed, so that nobody can change what others compute with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FILL_TIMEOUT_S = 120.0  # that somebody else may take to fill one before it is done without
_MAX_LABEL = 200  # a memfd's name has 249 characters
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("SEAL", "SHRINK", "GROW", "WRITE"))


class HostFile:
    """Owns the descriptor until `detach`."""

    def __init__(self, fd: int, *, is_mine: bool) -> None:
        self.fd = fd
        self.is_mine = is_mine  # to be filled by this process

    def finish(self) -> None:
        """It has its final size and content: nobody can change it any more, and others may use it."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def detach(self) -> int:
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.detach())


def open_host_file(label: str, lock_path: Path) -> HostFile | None:
    """The finished file of this label, or a new one for the caller to fill; None where the system has no such files, or
    whoever fills it does not come to an end. Blocks meanwhile.

    `lock_path` is any file that all who share can open: two that look at once must not both begin.
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
            return None  # a file system without locks, or no memory
        if _is_finished(found):
            return HostFile(found, is_mine=False)
        is_over = _wait_unlocked(found)
        finished = _is_finished(found)
        if finished:
            return HostFile(found, is_mine=False)
        os.close(found)
        if not is_over:
            return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # held for a look at the processes
        yield


def _create(label: str) -> HostFile:
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return HostFile(fd, is_mine=True)


def _find(label: str) -> int | None:
    """An open descriptor of the file that somebody fills or has filled; one that was left half filled is nobody's."""
    link, me = f"/memfd:{label} (deleted)", os.getuid()
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if process.stat().st_uid != me:
                continue
            for name in os.listdir(f"/proc/{process.name}/fd"):
                path = f"/proc/{process.name}/fd/{name}"
                with contextlib.suppress(OSError):
                    if os.readlink(path) == link:
                        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        if _is_finished(fd) or not _try_lock(fd):
                            return fd
                        os.close(fd)
    return None


def _is_finished(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def _try_lock(fd: int) -> bool:
    """Whether nobody fills it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_unlocked(fd: int) -> bool:
    """Until whoever fills it has finished or ended; False where that takes too long. The kernel wakes no waiter of a
    lock by a deadline, hence a thread."""
    over = threading.Event()
    own = os.dup(fd)

    def wait() -> None:
        with os.fdopen(own, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
        over.set()

    threading.Thread(target=wait, name="shared weights", daemon=True).start()
    return over.wait(FILL_TIMEOUT_S)
