"""Parses how a checkpoint rotates queries and keys, from `config.json`'s RoPE keys in both of their spellings.

`engine.models.config` reads it once while a model loads; `engine.layers.rope` makes tables of the result. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointError

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
_SUPPORTED: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}
_DEFAULT_THETA = 10000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS: dict[str, set[str]] = {
    "default": {"factor", "original_max_position_embeddings"},  # written by some exporters, without effect
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding over the first `rotated_dim` values of a head that pairs their two halves, or adjacent
    values."""

    type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_context: int = 0  # tokens that the model was trained with; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # multiplies cos and sin; yarn and longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ends of the ramp are rounded to dimensions
    wave_factors: tuple[float, ...] = ()  # longrope: what each pair's wavelength is multiplied by
    rotated_dim: int | None = None  # None: the whole head
    pairs_neighbours: bool = False  # only of whole heads


def parse_ropes(
    data: Mapping[str, Any],
    file: Path,
    head_dim: int,
    theta: float,
    local_theta: float | None,
    partial: float | None,
) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the embedding of all layers, or of those without a window, and that of layers with one in families that
    have two (`local_theta`). Arguments and errors are those of `parse_rope`."""
    if local_theta is None:
        return parse_rope(data, file, head_dim, theta, partial), None
    table = data.get("rope_parameters") or {}
    if not (isinstance(table, Mapping) and table.keys() & set(_LAYER_TYPES)):
        local = RopeConfig(theta=float(data.get("rope_local_base_freq") or local_theta))
        return parse_rope(data, file, head_dim, theta, partial), local
    if unknown := sorted(set(table) - set(_LAYER_TYPES)):
        raise CheckpointError(
            f"{file}: rope_parameters.{unknown[0]} = {table[unknown[0]]!r} is unknown in a table by kind of layer; "
            "remove it"
        )
    rest = {key: value for key, value in data.items() if key not in ("rope_theta", "rope_scaling")}
    every, local = (
        parse_rope(rest | {"rope_parameters": table.get(kind)}, file, head_dim, base, partial)
        for kind, base in zip(_LAYER_TYPES, (theta, local_theta), strict=True)
    )
    return every, local


def parse_rope(
    data: Mapping[str, Any],
    file: Path,
    head_dim: int,
    default_theta: float = _DEFAULT_THETA,
    default_partial: float | None = None,
) -> RopeConfig:
    """Parses `rope_parameters`, or `rope_scaling` with `rope_theta`.

    `default_partial` is the family's rotated part of a head, or None for a family that rotates whole heads. Raises
    CheckpointError for unsupported values."""
    name = "rope_parameters" if data.get("rope_parameters") else "rope_scaling"
    rope = data.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(f"{file}: {name} = {rope!r}; one flat table for all layers is supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in _SUPPORTED:
        raise CheckpointError(
            f"{file}: {name}.rope_type = {kind!r} is not supported; give a checkpoint with one of "
            f"{', '.join(_SUPPORTED)}"
        )
    unknown = sorted(set(rope) - _COMMON_KEYS - _KEYS[kind])
    if unknown:
        raise CheckpointError(
            f"{file}: {name}.{unknown[0]} = {rope[unknown[0]]!r} is unknown for rope_type {kind!r} and could change "
            "results; remove it if it does not"
        )
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    rotated_dim = _rotated_dim(partial, default_partial, head_dim, file)
    theta = rope.get("rope_theta") or data.get("rope_theta") or default_theta
    config = _parse_kind(kind, _Fields(rope, f"{file}: {name}"), data, float(theta), rotated_dim)
    return config if rotated_dim == head_dim else replace(config, rotated_dim=rotated_dim)


def _rotated_dim(partial: Any, default: float | None, head_dim: int, file: Path) -> int:
    if default is None:
        if partial not in (None, 1, 1.0):
            raise CheckpointError(f"{file}: partial_rotary_factor = {partial!r}; only whole heads (1.0) can be rotated")
        return head_dim
    part = default if partial is None else partial
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise CheckpointError(f"{file}: partial_rotary_factor = {part!r}: a number above 0 and at most 1 is needed")
    rotated_dim = int(head_dim * part)
    if rotated_dim < 2 or rotated_dim % 2 or head_dim % 2:
        raise CheckpointError(
            f"{file}: partial_rotary_factor = {part!r} rotates {rotated_dim} of {head_dim} values of a head; give a "
            "factor that rotates an even number"
        )
    return rotated_dim


def _parse_kind(kind: str, fields: _Fields, data: Mapping[str, Any], theta: float, rotated_dim: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=fields.positive("factor"))
    context = int(data["max_position_embeddings"])
    original = int(
        data.get("original_max_position_embeddings") or fields.values.get("original_max_position_embeddings") or context
    )
    if kind == "llama3":
        return _parse_llama3(fields, theta, original)
    if kind == "longrope":
        return _parse_longrope(fields, theta, original, context, rotated_dim)
    return _parse_yarn(fields, theta, original, context)


def _parse_llama3(fields: _Fields, theta: float, original: int) -> RopeConfig:
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if high < low:
        raise CheckpointError(f"{fields.where}.high_freq_factor = {high}: must not be below low_freq_factor = {low}")
    factor = fields.positive("factor")
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _parse_yarn(fields: _Fields, theta: float, original: int, context: int) -> RopeConfig:
    factor = fields.positive("factor", default=context / original)
    attention_factor = fields.positive("attention_factor", default=_yarn_attention_factor(fields, factor))
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=attention_factor,
        beta_fast=fields.positive("beta_fast", default=32.0),
        beta_slow=fields.positive("beta_slow", default=1.0),
        truncate=bool(fields.values.get("truncate", True)),
    )


def _parse_longrope(fields: _Fields, theta: float, original: int, context: int, rotated_dim: int) -> RopeConfig:
    """Chooses the long factors for a model whose context exceeds the one it was trained with (Ding et al. 2024,
    arXiv:2402.13753).

    `transformers` decides by the length of each text and then rotates all its tokens alike. Here the model's context
    decides, because the keys in a page must not depend on how long its text becomes.
    """
    factor = fields.positive("factor", default=context / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        attention_factor=fields.positive("attention_factor", default=magnitude),
        original_context=original,
        wave_factors=fields.positives("long_factor" if context > original else "short_factor", rotated_dim // 2),
    )


def _yarn_attention_factor(fields: _Fields, factor: float) -> float:
    """Returns the factor of Peng et al., "YaRN", section 3.4; with `mscale` as the DeepSeek configs use it."""

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = fields.values.get("mscale"), fields.values.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


@dataclass(frozen=True, slots=True)
class _Fields:
    values: Mapping[str, Any]
    where: str

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.where}.{key} = {value!r}: a positive number is needed")
        return float(value)

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        values = self.values.get(key)
        numbers = values if isinstance(values, list) else []
        if len(numbers) != count or not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise CheckpointError(f"{self.where}.{key} = {values!r}: a list of {count} positive numbers is needed")
        return tuple(float(number) for number in numbers)
