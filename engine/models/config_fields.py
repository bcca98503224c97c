"""Reads typed values from a checkpoint's JSON files, for the parsers of this room. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError if the file is missing or holds anything else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; {_where_to_get(file.parent)}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; give valid JSON") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds {type(data).__name__}; a JSON object is needed")
    return data


def _where_to_get(folder: Path) -> str:
    """Returns what to do about a folder that is not a checkpoint."""
    if folder.exists() or len(folder.parts) != 2 or folder.is_absolute():
        return "give a Hugging Face checkpoint folder"
    name = folder.parts[1]
    return f"if that is a model of the Hugging Face Hub, run `hf download {folder} --local-dir {name}` and give {name}"


def positive_int(data: Mapping[str, Any], key: str, file: Path, default: int | None = None) -> int:
    """Returns a positive whole number, or `default` where the key is missing or null. Raises CheckpointError."""
    value = data.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{file}: {key} = {value!r}: a positive whole number is needed")
    return value
