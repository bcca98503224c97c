"""What a model's folder holds, as far as workers and routers have to agree on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.model_config import ModelConfig
from penstock.errors import InvalidInput

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Revision:
    model: str  # changes whenever configuration or weights do
    tokenizer: str  # digest
    vocab_size: int


def read_revision(folder: str) -> Revision:
    """Blocks. Raises CheckpointError."""
    config = ModelConfig.from_folder(folder)
    path = Path(folder, _TOKENIZER)
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.exists() else ""
    return Revision(config.revision, digest, config.vocab_size)


def check_upgrade(old: Revision, new: Revision, folder: str) -> None:
    """Raises InvalidInput where routers could not serve both."""
    for name in ("tokenizer", "vocab_size"):
        if getattr(old, name) != getattr(new, name):
            raise InvalidInput(
                "model",
                f"is {folder!r}, whose {name} is not that of the model that is served; routers know one tokenizer, "
                "so start another deployment for it",
            )
