"""Reads configuration files. Every problem is one line that names the file, the key, its value and the fix."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.config.router import RouterConfig
from penstock.config.workers import WorkerConfig
from penstock.errors import ConfigError

_SECRETIVE = {"keys", "secret"}  # settings whose values messages must not repeat

ConfigT = TypeVar("ConfigT", bound=BaseModel)
ProcessT = TypeVar("ProcessT", WorkerConfig, RouterConfig)


def load(kind: type[ConfigT], path: str | Path) -> ConfigT:
    """Reads and validates a `.toml` or `.json` file. Raises ConfigError."""
    return parse(kind, read(path), source=str(path))


def load_process(
    kind: type[ProcessT],
    path: str | Path,
    secret_file: str | None,
    own: Mapping[str, object] = MappingProxyType({}),
) -> ProcessT:
    """Reads the configuration of one process, with the cluster secret from `secret_file` if that is given. `own` holds
    the settings in which processes that share the file differ; they override the file's.

    Raises ConfigError.
    """
    data = {**read(path), **own}
    security = data.get("security", {})
    if secret_file and isinstance(security, dict):
        data = {**data, "security": {**security, "secret_file": secret_file}}
    return parse(kind, data, source=str(path))


def read(path: str | Path) -> dict[str, object]:
    """Returns the data of a `.toml` or `.json` file without validating it. Raises ConfigError."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"config file {file}: {error}; give a readable TOML or JSON file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"config file {file}: holds {type(data).__name__}; give a table of keys and values")
    return data


def parse(kind: type[ConfigT], data: object, source: str = "config") -> ConfigT:
    """Validates plain data. Raises ConfigError with one line for each problem."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {_explain(problem)}" for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from error


def _explain(problem: object) -> str:
    assert isinstance(problem, dict)
    key = ".".join(str(part) for part in problem["loc"]) or "(whole)"
    # The input may be a key or a secret, or a table that holds one.
    hidden = isinstance(problem["input"], dict) or not _SECRETIVE.isdisjoint(problem["loc"])
    shown = "" if hidden else f" = {problem['input']!r}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{shown}; remove it or correct its spelling"
    return f"{key}{shown}: {problem['msg']}"
