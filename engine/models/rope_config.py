"""Parses how a checkpoint rotates queries and keys, from `config.json`'s RoPE keys in both of their spellings.

`engine.models.config` reads it once while a model loads; `engine.layers.rope` makes tables of the result. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointError

RopeType = Literal["default", "linear", "llama3", "yarn"]
_SUPPORTED: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
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
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding over the whole head that pairs its two halves (not adjacent values)."""

    type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_context: int = 0  # tokens that the model was trained with; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # multiplies cos and sin; yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ends of the ramp are rounded to dimensions


def parse_rope(data: Mapping[str, Any], file: Path, default_theta: float = _DEFAULT_THETA) -> RopeConfig:
    """Parses `rope_parameters`, or `rope_scaling` with `rope_theta`. Raises CheckpointError for unsupported values."""
    name = "rope_parameters" if data.get("rope_parameters") else "rope_scaling"
    rope = data.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(f"{file}: {name} = {rope!r}; one flat table for all layers is supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
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
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"{file}: partial_rotary_factor = {partial!r}; only whole heads (1.0) can be rotated")
    theta = rope.get("rope_theta") or data.get("rope_theta") or default_theta
    fields = _Fields(rope, f"{file}: {name}")
    if kind == "default":
        return RopeConfig("default", float(theta))
    if kind == "linear":
        return RopeConfig("linear", float(theta), factor=fields.positive("factor"))
    context = int(data["max_position_embeddings"])
    original = int(
        data.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
    )
    if kind == "llama3":
        return _parse_llama3(fields, float(theta), original)
    return _parse_yarn(fields, float(theta), original, context)


def _parse_llama3(fields: _Fields, theta: float, original: int) -> RopeConfig:
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{fields.where}.high_freq_factor = {high}: must be above low_freq_factor = {low}")
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
