"""Parses which layers of a model see only a window of the last tokens.

`engine.models.config` reads it once while a model loads. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.config_fields import positive_int
from engine.models.families import Family
from penstock.errors import CheckpointError


def read_windows(data: Mapping[str, Any], family: Family, num_layers: int, file: Path) -> tuple[int | None, ...]:
    """Returns how many tokens a query of each layer sees, itself included; None: all. Raises CheckpointError."""
    if "sliding_window" not in family.keys:
        return (None,) * num_layers
    window = data.get("sliding_window", family.sliding_window)
    if "use_sliding_window" in family.keys and not data.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"{file}: sliding_window = {window!r}: a positive number of tokens or null is needed")
    if "layer_types" not in family.keys:
        return (window,) * num_layers
    layer_types = data.get("layer_types")
    if layer_types is None and family.window_pattern is not None:
        pattern = family.window_pattern
        for key in ("_sliding_window_pattern", "sliding_window_pattern"):
            pattern = positive_int(data, key, file, pattern)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if layer_types is None:
        first = data.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(_layer_window(kind, window, file) for kind in _checked_length(layer_types, num_layers, file))


def _checked_length(layer_types: Any, num_layers: int, file: Path) -> list[str]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(f"{file}: layer_types = {layer_types!r}: {num_layers} entries are needed, one per layer")
    return layer_types


def _layer_window(kind: str, window: int | None, file: Path) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise CheckpointError(f"{file}: layer_types holds {kind!r}; give full_attention or sliding_attention")
    if window is None:
        raise CheckpointError(
            f"{file}: layer_types holds 'sliding_attention', but sliding_window is off; give sliding_window, "
            "and use_sliding_window where the family has it"
        )
    return window
