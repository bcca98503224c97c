"""Holds received weights in this process's memory, and writes them into a folder.

The memory is a memfd, so nothing is left of it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from engine.memory.device_memory import available_bytes
from engine.weights.checkpoint import SINGLE_FILE, weights_digest
from penstock.client.broadcast.manifest import WeightsManifest
from penstock.errors import CheckpointError

_LABEL = "penstock weights"


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
    """A folder of weights that appears at its path only when it is complete."""

    def __init__(self, path: Path, num_bytes: int, key: str) -> None:
        """Creates it under another name beside the path. Raises CheckpointError."""
        self._path = path
        self._partial = path.with_name(f".{path.name}.{key}")
        try:
            self._partial.mkdir(parents=True)
            free = shutil.disk_usage(self._partial).free
        except OSError as error:
            raise self._error(error) from error
        if num_bytes > free:
            self.discard()
            raise CheckpointError(f"{path} needs {num_bytes >> 20} MiB, and {free >> 20} MiB are free; free some")

    def write(self, staged: StagedWeights) -> None:
        """Copies the file to the disk. Blocks. Raises CheckpointError."""
        try:
            with staged.file.open("rb") as source, (self._partial / SINGLE_FILE).open("wb") as target:
                shutil.copyfileobj(source, target, 16 << 20)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            raise self._error(error) from error

    def publish(self) -> None:
        """Gives the folder its name. Raises CheckpointError if that is taken."""
        try:
            self._partial.rename(self._path)
        except OSError as error:
            raise self._error(error) from error

    def discard(self) -> None:
        """Removes what has not been published."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be written: {error}; give a new folder that workers may create")
