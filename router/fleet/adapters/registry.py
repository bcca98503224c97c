"""Finds the LoRA adapters that requests may name: those of the configuration, or of a file that may change.

A request carries its adapter to its workers, so workers need not know this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.config import RouterConfig
from penstock.kv.adapter_files import AdapterRef, read_adapter_ref
from penstock.rpc.reload import FileWatcher
from router.fleet.adapters.adapter_file import AdapterFile, check_names


class AdapterRegistry:
    """Finds adapters by name. A request keeps the adapter that it began with, even if the list changes."""

    def __init__(self) -> None:
        self._look_up: Callable[[], Mapping[str, AdapterRef]] = dict
        self.file: AdapterFile | None = None  # None: the list does not change

    def follow(self, config: RouterConfig, model: str, watcher: FileWatcher) -> None:
        """Finds the adapters of the configuration, or of its file, from now on. `model` is the served model's name.

        Blocks while it reads every adapter's files to compute their revisions; when the file changes, the watcher reads
        those that have changed. Raises ConfigError, or CheckpointError if an adapter of the configuration lacks a file.
        """
        if config.adapters_file:
            file = self.file = AdapterFile(config.adapters_file, model, watcher)
            self._look_up = lambda: file.adapters
        else:
            check_names(config.adapters, model)
            fixed = {name: read_adapter_ref(name, folder) for name, folder in config.adapters.items()}
            self._look_up = lambda: fixed

    def find(self, name: str) -> AdapterRef | None:
        return self._look_up().get(name)

    @property
    def all(self) -> list[AdapterRef]:
        """Returns the adapters, sorted by name."""
        return [adapter for _, adapter in sorted(self._look_up().items())]
