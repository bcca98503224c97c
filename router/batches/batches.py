"""Keeps batches in a folder. Its calls block on the disk.

A batch is the folder `FOLDER/tenant-NAME/batches/ID`. It contains the record, the output and error lines written so
far, a lock that the router running the batch holds, and a marker file once the batch is cancelled. If that router dies,
another one continues the batch: it runs the requests that have no output or error line yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.config.router import BatchConfig
from penstock.errors import Overloaded
from router.batches.files import FileStore, disk_errors, make_private_folder, tenant_folder, write_atomically
from router.batches.lines import custom_id_of
from router.batches.records import (
    BatchNotFound,
    BatchRecord,
    BatchStatus,
    BrokenRecord,
    check_batch_id,
    new_batch_id,
)

_RECORD, _LOCK, _CANCEL = "batch.json", "lock", "cancel"
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
_RETRY_AFTER_S = 60.0
_MAX_FINISHED = 1000  # batches kept for each tenant; beyond this, the oldest is deleted


class BatchClaim:
    """A router's exclusive right to run a batch, held until `close` or the end of the process."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self._writing = threading.Lock()
        self._is_sealed = False

    @property
    def record(self) -> BatchRecord:
        return BatchRecord.load((self._folder / _RECORD).read_text())

    def save(self, record: BatchRecord) -> None:
        write_atomically(self._folder / _RECORD, record.dump())

    @property
    def is_cancelled(self) -> bool:
        """Returns whether the batch has been cancelled."""
        return (self._folder / _CANCEL).exists()

    def path(self, name: str) -> Path:
        return self._folder / name

    def done(self, name: str) -> set[str]:
        """Returns the ids of the requests that have a line in the file. Removes an incomplete last line."""
        path, found, end = self._folder / name, set[str](), 0
        if not path.exists():
            return found
        with path.open("rb+") as file:
            for line in file:
                custom_id = custom_id_of(line)
                if custom_id is None:
                    break
                found.add(custom_id)
                end += len(line)
            file.truncate(end)
        return found

    def append(self, name: str, line: bytes) -> None:
        """Adds a line unless the batch is sealed, since the thread of a cancelled task may still call this."""
        with self._writing:
            if not self._is_sealed:
                self._append(name, line)

    def seal(self, unanswered: Callable[[set[str]], Iterable[bytes]] | None = None) -> int:
        """Ignores later answers, and adds the error lines that `unanswered` returns for the ids that have an answer.

        Returns the number of lines added.
        """
        with self._writing:
            self._is_sealed = True
            lines = [*unanswered(self.done(OUTPUT) | self.done(ERRORS))] if unanswered is not None else []
            for line in lines:
                self._append(ERRORS, line)
            return len(lines)

    def _append(self, name: str, line: bytes) -> None:
        """Adds the whole line or nothing, because a line after a partial one could not be read."""
        with (self._folder / name).open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
            except BaseException:
                file.truncate(size)
                raise

    def close(self) -> None:
        os.close(self._lock)


class BatchStore:
    def __init__(self, root: Path, config: BatchConfig, files: FileStore) -> None:
        self._root = root
        self._config = config
        self._files = files
        self._finished = set[str]()  # batches known to be finished, whose records need not be read again

    def create(
        self,
        tenant: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        window_s: float,
        metadata: dict[str, str] | None,
    ) -> BatchRecord:
        """Creates a batch. `window` is the caller's name for `window_s`.

        Raises FileNotFound, Overloaded if the tenant has too many batches or no room for another output file, and
        Unavailable if the disk fails.
        """
        self._files.get(tenant, input_file_id, "input_file_id")
        with disk_errors(self._root):
            self._files.check_room(tenant)
            finished, num_open = self._count_batches(tenant)
            if num_open >= self._config.max_batches:
                limit = self._config.max_batches
                problem = f"this tenant has {num_open} unfinished batches, and router.batches.max_batches = {limit}"
                raise Overloaded(f"{problem}; wait for one", _RETRY_AFTER_S)
            now_s = int(time.time())
            record = BatchRecord(
                id=new_batch_id(),
                tenant=tenant,
                endpoint=endpoint,
                input_file_id=input_file_id,
                completion_window=window,
                created_at=now_s,
                expires_at=now_s + int(window_s),
                metadata=metadata,
            )
            self._forget(tenant, finished[:-_MAX_FINISHED])
            folder = self._folder(tenant) / record.id
            make_private_folder(self._root, folder)
            write_atomically(folder / _RECORD, record.dump())
            return record

    def _count_batches(self, tenant: str) -> tuple[list[str], int]:
        """Returns the ids of the tenant's finished batches, oldest first, and the number of the others.

        Reads only the records of batches that are not known to be finished.
        """
        finished, num_open = list[str](), 0
        for batch_id in self.ids(tenant):
            if batch_id not in self._finished:
                record = self.find(tenant, batch_id)
                if record is None:
                    continue
                if not record.status.is_final:
                    num_open += 1
                    continue
                self._finished.add(batch_id)
            finished.append(batch_id)
        return finished, num_open

    def _forget(self, tenant: str, ids: Iterable[str]) -> None:
        for batch_id in ids:
            shutil.rmtree(self._folder(tenant) / batch_id, ignore_errors=True)

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Returns the record of a batch. Raises BatchNotFound."""
        check_batch_id(batch_id)
        try:
            with disk_errors(self._root):
                return self._load(self._folder(tenant) / batch_id)
        except FileNotFoundError:
            problem = f"is {batch_id!r}, which is no batch of yours; GET /v1/batches lists them"
            raise BatchNotFound("batch_id", problem) from None

    def ids(self, tenant: str) -> list[str]:
        """Returns the ids of the tenant's batches, oldest first. Reads no record."""
        with disk_errors(self._root):
            try:
                return sorted(name for name in os.listdir(self._folder(tenant)) if name.startswith("batch_"))
            except FileNotFoundError:
                return []

    def find(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Returns a batch's record; None if the batch is gone or its record is broken."""
        try:
            with disk_errors(self._root), contextlib.suppress(BrokenRecord):
                return self._load(self._folder(tenant) / batch_id)
        except FileNotFoundError:
            pass  # it has been deleted
        return None

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Marks a batch for the router that runs it, which then ends it. Leaves finished batches as they are.

        Raises BatchNotFound.
        """
        record = self.get(tenant, batch_id)
        if not record.status.is_final:
            with disk_errors(self._root):
                (self._folder(tenant) / batch_id / _CANCEL).touch()
        return self.get(tenant, batch_id)

    def unfinished(self) -> list[tuple[str, str]]:
        """Returns the tenant and the id of every unfinished batch, oldest first."""
        found, finished = [], set[str]()
        for path in self._root.glob(f"tenant-*/batches/batch_*/{_RECORD}"):
            if path.parent.name in self._finished:
                finished.add(path.parent.name)
                continue
            with contextlib.suppress(OSError, BrokenRecord):
                record = BatchRecord.load(path.read_text())
                if record.status.is_final:
                    finished.add(record.id)
                else:
                    found.append((record.created_at, record.tenant, record.id))
        self._finished = finished
        return [(tenant, batch_id) for _, tenant, batch_id in sorted(found)]

    def claim(self, tenant: str, batch_id: str) -> BatchClaim | None:
        """Returns the right to run a batch; None if another router has it, or the batch is finished or deleted."""
        folder = self._folder(tenant) / batch_id
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            claim = BatchClaim(folder, lock)
            if not claim.record.status.is_final:
                return claim
        except (BlockingIOError, FileNotFoundError, BrokenRecord):
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def sweep(self, now_s: float) -> None:
        """Deletes finished batches older than the maximum age."""
        for path in self._root.glob(f"tenant-*/batches/batch_*/{_RECORD}"):
            with contextlib.suppress(OSError, BrokenRecord):
                is_old = now_s - path.stat().st_mtime > self._config.age_s
                if is_old and BatchRecord.load(path.read_text()).status.is_final:
                    shutil.rmtree(path.parent, ignore_errors=True)

    def _load(self, folder: Path) -> BatchRecord:
        record = BatchRecord.load((folder / _RECORD).read_text())
        if (folder / _CANCEL).exists() and not record.status.is_final and record.status is not BatchStatus.CANCELLING:
            record = record.entered(BatchStatus.CANCELLING, (folder / _CANCEL).stat().st_mtime)
        return record

    def _folder(self, tenant: str) -> Path:
        return tenant_folder(self._root, tenant) / "batches"
