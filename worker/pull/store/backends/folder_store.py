"""Keeps objects as files of a folder, which hosts may share over NFS, CephFS, Lustre and the like.

A file is written under another name and then renamed, so a crash leaves a partial file that housekeeping removes, and
never half an object. It is not synced to the disk: a file that a power failure damages does not match its tag. Only the
user that runs the workers can read it, since KV reveals prompts. Reading a file renews its modification time, at most
once a minute, because many file systems are mounted without access times.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.errors import ConfigError
from worker.pull.store.backends.object_store import PARTIAL_SUFFIX, StoredObject

_RENEW_AFTER_S = 60.0


class FolderStore:
    """Implements `ObjectStore`."""

    def __init__(self, root: str) -> None:
        """Raises ConfigError if nothing can be written below this folder."""
        self._root = Path(root)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            readable = os.access(self._root, os.R_OK | os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError(
                f"kv_store.url = file://{root}: {error.strerror}; give a folder that this user can make or write"
            ) from error
        if not readable:
            raise ConfigError(f"kv_store.url = file://{root}: this user may not read and write there; change its mode")

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            content = bytearray(min(status.st_size, max_bytes))
            view, done = memoryview(content), 0
            while done < len(view) and (num_read := os.readv(fd, [view[done:]])):
                done += num_read
            if time.time() - status.st_mtime > _RENEW_AFTER_S:
                with suppress(OSError):  # another user's file, or a read-only mount: the object only counts as older
                    os.utime(fd)
            return view[:done]
        finally:
            os.close(fd)

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        target = self._root / name
        partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
        fd = self._create(partial)
        try:
            try:
                for part in parts:
                    _write_all(fd, memoryview(part))
            finally:
                os.close(fd)
            os.replace(partial, target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def list(self, folder: str) -> Iterator[StoredObject]:
        try:
            entries = os.scandir(self._root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                name = f"{folder}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield from self.list(name)
                    continue
                with suppress(FileNotFoundError):  # deleted in the meantime
                    status = entry.stat(follow_symlinks=False)
                    yield StoredObject(name, status.st_size, status.st_mtime)


def _write_all(fd: int, part: memoryview) -> None:
    done = 0
    while done < len(part):
        done += os.write(fd, part[done:])
