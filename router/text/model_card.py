"""Reads what the router needs of the model's checkpoint folder: vocabulary size and generation defaults.

It takes the context length and the revision from workers' reports (`WorkerDescription`) instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RouterConfig
from penstock.errors import CheckpointError
from penstock.sizing.language_model import language_model_config
from router.text.chat_template import read_json

_SAMPLED = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str  # that clients use
    vocab_size: int
    generation_defaults: Mapping[str, float]

    @classmethod
    def load(cls, config: RouterConfig) -> ModelCard:
        """Reads the card from the checkpoint folder. Raises CheckpointError, which names the file and the key."""
        folder = Path(config.model)
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; point `model` at a Hugging Face checkpoint folder")
        vocab_size = language_model_config(read_json(path)).get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise CheckpointError(f"{path}: vocab_size = {vocab_size!r}; give the number of tokens in the vocabulary")
        name = config.served_model or folder.resolve().name
        return cls(name, vocab_size, _generation_defaults(folder / "generation_config.json"))


def _generation_defaults(path: Path) -> dict[str, float]:
    """Reads the defaults. Those for sampling apply only with `do_sample`, the penalty to greedy models as well."""
    config = read_json(path)
    sampled = _SAMPLED if config.get("do_sample") else ()
    return {name: config[name] for name in (*sampled, "repetition_penalty") if config.get(name) is not None}
