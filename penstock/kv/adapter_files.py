"""Identifies LoRA adapters by a name, the folder they are read from, and a revision that identifies the content.

A request carries the whole reference through every hop, so that any worker can load an adapter that it has never seen.
The revision is part of page hashes; a worker refuses an adapter whose files have a different revision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from penstock.errors import CheckpointError, InvalidInput

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_DIGEST_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request asks for."""

    name: str  # its name for clients
    revision: str
    path: str  # its folder at every worker

    def __str__(self) -> str:
        return f"adapter {self.name!r} ({self.path})"


def check_adapter_name(name: str, model: str) -> None:
    """Raises InvalidInput if no adapter may have this name. `model` is the name of the served model."""
    if not _NAME.fullmatch(name):
        raise InvalidInput("adapter", f"is named {name!r}; give 1 to 128 letters, digits, '.', '_', ':', '/' or '-'")
    if name == model:
        raise InvalidInput("adapter", f"is named {name!r}, like the model itself; give another name")


def read_adapter_ref(name: str, path: str) -> AdapterRef:
    """Reads the adapter's files to compute their revision; blocks. Raises CheckpointError if one is missing."""
    return AdapterRef(name, adapter_revision(Path(path)), path)


def adapter_revision(folder: Path) -> str:
    """Returns the digest of both files. Blocks; raises CheckpointError."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with (folder / name).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise CheckpointError(
                f"{folder / name}: {error.strerror}; give the folder of a PEFT adapter, with {CONFIG_FILE} and "
                f"{WEIGHTS_FILE}"
            ) from error
        digest.update(b"\0")
    return digest.hexdigest()


def revision_of(config: bytes, weights: bytes) -> str:
    """Returns the revision of files with this content."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for content in (config, weights):
        digest.update(content)
        digest.update(b"\0")
    return digest.hexdigest()
