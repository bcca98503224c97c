"""Keeps tenants' files in a folder, within bounds. Its calls block on the disk.

A file is `FOLDER/tenant-NAME/files/ID`, with its record next to it in `ID.json`. The record is written last, so content
without a record does not count as a file. Several processes may share the folder.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from penstock.config.router import BatchConfig
from penstock.errors import InvalidInput, Overloaded, Unavailable
from router.batches.records import BrokenRecord, FileNotFound, FileRecord, check_file_id, new_file_id, purpose_of

_COPY_BYTES = 1 << 20
_RETRY_AFTER_S = 60.0
_ABANDONED_S = 3600.0  # age at which content without a record is assumed to have been given up by its router


def tenant_folder(root: Path, tenant: str) -> Path:
    return root / f"tenant-{quote(tenant, safe='')}"


def make_private_folder(root: Path, folder: Path) -> None:
    """Makes a folder below `root`. If that makes `root` too, only this account may enter it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turns disk errors and broken records into Unavailable, which names the folder. FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = f"the folder of files and batches, {root}, cannot be used: {error.strerror}; free space or repair it"
        raise Unavailable(problem, _RETRY_AFTER_S) from error
    except BrokenRecord as error:
        problem = f"the folder of files and batches, {root}, is damaged: {error}; delete the broken record"
        raise Unavailable(problem, _RETRY_AFTER_S) from error


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file so that readers see either all of the old or all of the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class FileStore:
    def __init__(self, root: Path, config: BatchConfig) -> None:
        self.root = root
        self._config = config

    def put(self, tenant: str, filename: str, source: BinaryIO) -> FileRecord:
        """Stores the contents of `source`.

        Raises Overloaded beyond the tenant's limits, InvalidInput for too large a file, and Unavailable if the disk
        fails.
        """
        with disk_errors(self.root):
            room = self.check_room(tenant)
            path = self._folder(tenant) / new_file_id()
            make_private_folder(self.root, path.parent)
            try:
                num_bytes = self._copy(source, path, room)
                return self._record(path, filename, num_bytes)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def check_room(self, tenant: str) -> int:
        """Returns how many more bytes the tenant's files may take.

        Raises Overloaded if the tenant may store no more files or bytes, so that nothing that stores a file may start.
        """
        entries, limit = self._entries(tenant), self._config.tenant_bytes
        held = [entry for name, entry in entries.items() if _is_file(name, entries)]
        if len(held) >= self._config.max_files:
            problem = f"this tenant has {len(held)} files, and router.batches.max_files = {self._config.max_files}"
            raise Overloaded(f"{problem}; delete some", _RETRY_AFTER_S)
        room = limit - sum(entry.st_size for entry in held)
        if room <= 0:
            problem = f"this tenant's files hold {limit - room} bytes, and router.batches.tenant_bytes = {limit}"
            raise Overloaded(f"{problem}; delete some", _RETRY_AFTER_S)
        return room

    def _copy(self, source: BinaryIO, path: Path, room: int) -> int:
        num_bytes, limit = 0, self._config.file_bytes
        with path.open("xb") as target:
            while part := source.read(_COPY_BYTES):
                num_bytes += len(part)
                if num_bytes > limit:
                    raise InvalidInput("file", f"is larger than router.batches.file_bytes = {limit}; split it")
                if num_bytes > room:
                    raise Overloaded(
                        f"this tenant's files would hold more than router.batches.tenant_bytes = "
                        f"{self._config.tenant_bytes}; delete some",
                        _RETRY_AFTER_S,
                    )
                target.write(part)
        return num_bytes

    def keep(self, tenant: str, path: Path, filename: str, file_id: str) -> FileRecord:
        """Moves an output file of a batch to the tenant's files. Idempotent."""
        with disk_errors(self.root):
            target = self._folder(tenant) / file_id
            make_private_folder(self.root, target.parent)
            path.replace(target)
            path.unlink(missing_ok=True)  # a rename does nothing if both names link to one file
            return self._record(target, filename, target.stat().st_size)

    def _record(self, path: Path, filename: str, num_bytes: int) -> FileRecord:
        record = FileRecord(path.name, filename, purpose_of(path.name), num_bytes, int(time.time()))
        write_atomically(path.with_suffix(".json"), record.dump())
        return record

    def get(self, tenant: str, file_id: str, field: str = "file_id") -> FileRecord:
        """Returns the record of a file. Raises FileNotFound."""
        check_file_id(file_id, field)
        try:
            with disk_errors(self.root):
                record = FileRecord.load((self._folder(tenant) / f"{file_id}.json").read_text())
                (self._folder(tenant) / file_id).stat()
                return record
        except FileNotFoundError:
            problem = f"is {file_id!r}, which is no file of yours; GET /v1/files lists them"
            raise FileNotFound(field, problem) from None

    def path(self, tenant: str, file_id: str, field: str = "file_id") -> Path:
        """Returns the path of a file's content. Raises FileNotFound."""
        self.get(tenant, file_id, field)
        return self._folder(tenant) / file_id

    def ids(self, tenant: str, purpose: str | None = None) -> list[str]:
        """Returns the ids of the tenant's files, oldest first, or only of those with a purpose. Reads no record."""
        entries = self._entries(tenant)
        found = [name for name in entries if _is_file(name, entries) and purpose in (None, purpose_of(name))]
        return sorted(found, key=lambda name: (entries[f"{name}.json"].st_mtime_ns, name))

    def find(self, tenant: str, file_id: str) -> FileRecord | None:
        """Returns a file's record; None if the file is gone or its record is broken."""
        try:
            with disk_errors(self.root), contextlib.suppress(BrokenRecord):
                return FileRecord.load((self._folder(tenant) / f"{file_id}.json").read_text())
        except FileNotFoundError:
            pass  # it has been deleted
        return None

    def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises FileNotFound."""
        path = self.path(tenant, file_id)
        with disk_errors(self.root):
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def sweep(self, now_s: float) -> None:
        """Deletes files older than the maximum age, and content that no router has finished writing."""
        for path in self.root.glob("tenant-*/files/file-*"):
            with contextlib.suppress(OSError):
                age_s = now_s - path.stat().st_mtime
                is_abandoned = path.suffix == "" and not path.with_suffix(".json").exists() and age_s > _ABANDONED_S
                if age_s > self._config.age_s or is_abandoned:
                    path.with_suffix(".json").unlink(missing_ok=True)
                    path.with_suffix("").unlink(missing_ok=True)

    def _entries(self, tenant: str) -> dict[str, os.stat_result]:
        """Returns the status of everything in the tenant's folder of files, by name."""
        found = dict[str, os.stat_result]()
        with (
            disk_errors(self.root),
            contextlib.suppress(FileNotFoundError),
            os.scandir(self._folder(tenant)) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it is being deleted
                    found[entry.name] = entry.stat()
        return found

    def _folder(self, tenant: str) -> Path:
        return tenant_folder(self.root, tenant) / "files"


def _is_file(name: str, entries: Container[str]) -> bool:
    """Returns whether an entry is the content of a file that has a record."""
    return "." not in name and f"{name}.json" in entries
