"""The LoRA adapters that requests may name: from the configuration at the start, then as the Admin service lists them.

A request carries its adapter to its workers, so no worker has to know this list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import ConfigError, InvalidInput
from penstock.kv.adapters import AdapterRef, check_adapter_name, read_adapter_ref


class AdapterRegistry:
    """Replaced as a whole: a request that has begun keeps the adapter that it was given."""

    def __init__(self) -> None:
        self._by_name: Mapping[str, AdapterRef] = {}

    def set(self, adapters: Iterable[AdapterRef]) -> None:
        self._by_name = {adapter.name: adapter for adapter in adapters}

    def find(self, name: str) -> AdapterRef | None:
        return self._by_name.get(name)

    @property
    def all(self) -> list[AdapterRef]:
        """The adapters by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]


def read_adapters(paths: Mapping[str, str], model: str) -> list[AdapterRef]:
    """Reads the revision of each adapter of a configuration. Blocks.

    Raises ConfigError for a name that none may have, and CheckpointError where a file is missing.
    """
    for name in paths:
        try:
            check_adapter_name(name, model)
        except InvalidInput as error:
            raise ConfigError(f"adapters: {error.message}") from error
    return [read_adapter_ref(name, path) for name, path in paths.items()]
