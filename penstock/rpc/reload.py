"""Reads keys, secrets and certificates from files that an operator may replace while the process runs.

One task of each process checks the files and reads those that have changed. Unusable files are refused with a log line,
and the previous value stays in force. Symbolic links are followed, since mounted Kubernetes secrets are replaced
through one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from penstock.errors import PenstockError

log = logging.getLogger(__name__)

POLL_S = 1.0  # time between two checks of the files
ValueT = TypeVar("ValueT")
FileMark = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles(Generic[ValueT]):
    """A value read from files. `value` is the last usable one; any thread may read it."""

    def __init__(self, setting: str, paths: Sequence[str], read: Callable[[], ValueT]) -> None:
        """Reads the files that `setting` names. Like `read`, raises ConfigError for unusable files."""
        self.setting = setting
        self._paths = [path for path in paths if path]
        self._read = read
        self._mark = mark_files(self._paths)
        self.value = read()
        self.version = 1  # version of the value
        self.loaded_unix_s = time.time()
        self.problem = ""  # why the current files were refused

    def refresh(self) -> bool:
        """Reads the files if they have changed. Returns whether they were read or refused. May block on the disk."""
        mark = mark_files(self._paths)
        if mark == self._mark:
            return False
        try:
            value = self._read()
        except Exception as error:  # no content of a file may stop the watching task
            self._mark = mark
            self.problem = error.message if isinstance(error, PenstockError) else type(error).__name__
            log.error("%s; the previous content stays in force (%s)", self.problem, self.setting)
            return True
        if mark_files(self._paths) != mark:
            return False  # they are still being written, so the next check finds them changed
        self._mark = mark
        self.value, self.version, self.loaded_unix_s, self.problem = value, self.version + 1, time.time(), ""
        log.info("%s was read again: %s", self.setting, ", ".join(self._paths))
        return True


class FileWatcher:
    """Watches all reloadable files of a process. Its creator awaits `follow` in a task."""

    def __init__(self, on_read: Callable[[WatchedFiles[Any]], None] = lambda files: None) -> None:
        """`on_read` is called on the event loop after files were read again or refused."""
        self.files: list[WatchedFiles[Any]] = []
        self._on_read = on_read

    def watch(self, setting: str, paths: Sequence[str], read: Callable[[], ValueT]) -> WatchedFiles[ValueT]:
        """Reads files now, and again when they change. Raises ConfigError, but only now."""
        files = WatchedFiles(setting, paths, read)
        self.files.append(files)
        return files

    async def follow(self, poll_s: float = POLL_S) -> None:
        """Checks the files until it is cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            for files in self.files:
                if await asyncio.to_thread(files.refresh):
                    self._on_read(files)


def mark_files(paths: Sequence[str]) -> FileMark:
    """Returns a value that changes whenever one of the files is replaced or written."""
    marks: list[tuple[int, int, int, int] | None] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            marks.append(None)
        else:
            marks.append((found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(marks)
