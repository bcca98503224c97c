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
LOOK_TIMEOUT_S = 10.0  # and to look at the processes: it takes milliseconds, unless it is stopped meanwhile
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
            return None  # a file system without locks, no memory, or somebody who does not let go of the lock
        if _is_finished(found):
            return HostFile(found, is_mine=False)
        is_over = _lock_within(FILL_TIMEOUT_S, found, fcntl.LOCK_SH)
        if _is_finished(found):
            return HostFile(found, is_mine=False)
        os.close(found)
        if not is_over:
            return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """For a look at the processes. Raises OSError, TimeoutError among them."""
    with path.open("rb") as stream:
        if not _lock_within(LOOK_TIMEOUT_S, stream.fileno(), fcntl.LOCK_EX):
            raise TimeoutError(f"{path} has been locked for {LOOK_TIMEOUT_S:g} s")
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
                        if not _try_lock(fd) or _is_finished(fd):  # in this order: it may be finished just now
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


def _lock_within(timeout_s: float, fd: int, kind: int) -> bool:
    """Until nobody else's lock is in the way; False where that takes too long. Raises OSError where there are no locks.
    The kernel wakes no waiter of a lock by a deadline, hence a thread."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass  # somebody holds it
    over = threading.Event()
    own = os.dup(fd)  # of the same lock, which is gone with the last of the two

    def wait() -> None:
        with os.fdopen(own, "rb") as stream:
            fcntl.flock(stream, kind)
        over.set()

    threading.Thread(target=wait, name="shared weights", daemon=True).start()
    return over.wait(timeout_s)
