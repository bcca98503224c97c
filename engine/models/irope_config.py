"""Parses the interleaved attention of Llama 4 ("iRoPE"): which layers rotate queries and keys, and which see only their
chunk of the text.

`engine.models.config` reads it once while a model loads. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.config_fields import positive_int
from penstock.errors import CheckpointError

IROPE_KEYS = frozenset({
    "no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size", "use_qk_norm",
    "attn_temperature_tuning", "floor_scale", "attn_scale",
})  # fmt: skip
_CHUNK_TOKENS = 8192
_KINDS = ("full_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Scales the query at position p by `1 + scale * log(1 + floor((p + 1) / floor_tokens))` (arXiv:2501.19399)."""

    floor_tokens: float
    scale: float


@dataclass(frozen=True, slots=True)
class IRopeConfig:
    rotated: frozenset[int]  # layers that rotate queries and keys
    chunked: frozenset[int]  # layers in which a token sees only its chunk of the text
    chunk_tokens: int | None  # None: no layer is chunked
    has_head_norms: bool  # layers that rotate also divide each query and key by its root mean square
    temperature: QueryTemperature | None  # of layers that do not rotate


def parse_irope(data: Mapping[str, Any], num_layers: int, file: Path) -> IRopeConfig:
    """Raises CheckpointError for inconsistent or unsupported values."""
    rotates = data.get("no_rope_layers")  # despite its name, 1 marks a layer that rotates
    if not rotates:
        interval = positive_int(data, "no_rope_layer_interval", file, 4)
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) < num_layers or not set(rotates) <= {0, 1}:
        raise CheckpointError(f"{file}: no_rope_layers = {rotates!r}: a list of {num_layers} values 0 or 1 is needed")
    rotated = frozenset(layer for layer in range(num_layers) if rotates[layer])
    kinds = data.get("layer_types")
    if kinds is None:
        kinds = [_KINDS[layer in rotated] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise CheckpointError(
            f"{file}: layer_types = {kinds!r}: {num_layers} entries are needed, each {' or '.join(_KINDS)}"
        )
    has_chunks = data.get("attention_chunk_size", _CHUNK_TOKENS) is not None
    chunked = frozenset(layer for layer, kind in enumerate(kinds) if kind == "chunked_attention" and has_chunks)
    return IRopeConfig(
        rotated=rotated,
        chunked=chunked,
        chunk_tokens=positive_int(data, "attention_chunk_size", file, _CHUNK_TOKENS) if chunked else None,
        has_head_norms=bool(data.get("use_qk_norm", True)),
        temperature=_temperature(data, file),
    )


def _temperature(data: Mapping[str, Any], file: Path) -> QueryTemperature | None:
    if not data.get("attn_temperature_tuning", True):
        return None
    values = {"floor_scale": data.get("floor_scale", 8192), "attn_scale": data.get("attn_scale", 0.1)}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{file}: {key} = {value!r}: a positive number is needed")
    return QueryTemperature(float(values["floor_scale"]), float(values["attn_scale"]))
