"""Finds the LoRA adapters that requests may name: those of the configuration, or of a file that may change.

A request carries its adapter to its workers, so workers need not know this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.config import RouterConfig, load
from penstock.config.router import AdaptersFile
from penstock.errors import CheckpointError, ConfigError, InvalidInput
from penstock.kv.adapter_files import AdapterRef, check_adapter_name, read_adapter_ref
from penstock.rpc.reload import FileWatcher


class AdapterRegistry:
    """Finds adapters by name. A request keeps the adapter that it began with, even if the list changes."""

    def __init__(self) -> None:
        self._look_up: Callable[[], Mapping[str, AdapterRef]] = dict

    def follow(self, look_up: Callable[[], Mapping[str, AdapterRef]]) -> None:
        """Uses `look_up`, which returns the adapters by name, from now on."""
        self._look_up = look_up

    def find(self, name: str) -> AdapterRef | None:
        return self._look_up().get(name)

    @property
    def all(self) -> list[AdapterRef]:
        """Returns the adapters, sorted by name."""
        return [adapter for _, adapter in sorted(self._look_up().items())]


def watch_adapters(config: RouterConfig, model: str, watcher: FileWatcher) -> Callable[[], Mapping[str, AdapterRef]]:
    """Returns a function that returns the adapters that requests may name now. `model` is the served model's name.

    Blocks while it reads every adapter's files to compute their revisions; the watcher does the same when the file
    changes. Raises ConfigError, or CheckpointError if an adapter of the configuration lacks a file.
    """
    if not config.adapters_file:
        fixed = _read_adapters(config.adapters, model)
        return lambda: fixed
    path = Path(config.adapters_file)

    def read() -> Mapping[str, AdapterRef]:
        try:
            named = load(AdaptersFile, path).adapters
            return _read_adapters({name: str(path.parent / folder) for name, folder in named.items()}, model)
        except (ConfigError, CheckpointError) as error:
            raise ConfigError(f"adapters_file = {path}: {error.message}") from None

    files = watcher.watch("adapters_file", (str(path),), read)
    return lambda: files.value


def _read_adapters(paths: Mapping[str, str], model: str) -> Mapping[str, AdapterRef]:
    for name in paths:
        try:
            check_adapter_name(name, model)
        except InvalidInput as error:
            raise ConfigError(f"adapters: {error.message}") from error
    return {name: read_adapter_ref(name, path) for name, path in paths.items()}
