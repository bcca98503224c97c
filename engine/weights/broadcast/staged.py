"""Holds received weights in this process's memory, and writes them into a folder.

The memory is a memfd, so nothing is left of it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch

from engine.memory.device_memory import available_bytes
from engine.weights.checkpoint import SINGLE_FILE, weights_digest
from penstock.client.broadcast.manifest import WeightsManifest
from penstock.errors import CheckpointError

log = logging.getLogger(__name__)

_LABEL = "penstock weights"
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}")  # names of folders that are not complete


class StagedWeights:
    """A safetensors file in memory, in a folder that this user's other processes can read as well."""

    def __init__(self, manifest: WeightsManifest) -> None:
        """Writes the file's header. Raises CheckpointError without enough memory, or on a system without memfd."""
        if not hasattr(os, "memfd_create"):
            raise CheckpointError("this system has no memfd to receive a broadcast; update the weights from a folder")
        header = manifest.file_header()
        size, free = len(header) + manifest.num_bytes, available_bytes()
        if size > free:
            raise CheckpointError(
                f"the broadcast has {size >> 20} MiB, and {free >> 20} MiB of host memory are free; give the machine "
                "more, or update the weights from a folder"
            )
        self._fd = os.memfd_create(_LABEL, os.MFD_CLOEXEC)
        os.truncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._map[: len(header)] = header
        self.data = torch.frombuffer(self._map, dtype=torch.uint8, offset=len(header))  # the bytes of all tensors
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-weights-"))
        self.file = self.folder / SINGLE_FILE
        self.file.symlink_to(f"/proc/{os.getpid()}/fd/{self._fd}")

    def folder_of(self, digest: str) -> Path | None:
        """Returns the folder if an update names these weights by `digest`, and None if it names others."""
        return self.folder if weights_digest(self.folder) == digest else None

    def close(self) -> None:
        """Frees the memory, once no process reads the file any more."""
        if self._fd >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            del self.data
            with contextlib.suppress(BufferError):  # a view is left; the memory is freed with it
                self._map.close()
            os.close(self._fd)
            self._fd = -1


class NewFolder:
    """A folder of weights that appears at its path only when it is complete.

    Until then its file is locked, so that the next broadcast into the same parent can tell a folder that is being
    written from one whose writer was killed.
    """

    def __init__(self, path: Path, num_bytes: int, key: str) -> None:
        """Creates it under another name beside the path; removes those of killed writers. Raises CheckpointError."""
        self._path = path
        self._partial = path.with_name(f".{path.name}.{key}")
        self._file: BinaryIO | None = None
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise self._error(error) from error
        try:
            self._file = (self._partial / SINGLE_FILE).open("wb")
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_abandoned(path.parent)
            free = shutil.disk_usage(self._partial).free
        except OSError as error:
            self.discard()
            raise self._error(error) from error
        if num_bytes > free:
            self.discard()
            raise CheckpointError(f"{path} needs {num_bytes >> 20} MiB, and {free >> 20} MiB are free; free some")

    def write(self, staged: StagedWeights) -> None:
        """Copies the file to the disk. Blocks. Raises CheckpointError."""
        assert self._file is not None
        try:
            with staged.file.open("rb") as source:
                shutil.copyfileobj(source, self._file, 16 << 20)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._error(error) from error

    def publish(self) -> None:
        """Gives the folder its name. Raises CheckpointError if that is taken."""
        try:
            self._partial.rename(self._path)
        except OSError as error:
            raise self._error(error) from error
        self._close()

    def discard(self) -> None:
        """Removes what has not been published."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # bytes that did not fit on the disk
                self._file.close()

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be written: {error}; give a new folder that workers may create")


def _remove_abandoned(parent: Path) -> None:
    """Removes the unfinished folders in `parent` whose writers are gone."""
    for partial in parent.glob(".*"):
        if not _PARTIAL.fullmatch(partial.name):
            continue
        with contextlib.suppress(OSError):  # locked by its writer, removed by another process, or not of a broadcast
            file = partial / SINGLE_FILE
            with file.open("r+b") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()
                partial.rmdir()
            log.info("removed %s, which a killed worker left", partial)
