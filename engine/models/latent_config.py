"""Parses latent attention in `config.json` (DeepSeek-V2, arXiv:2405.04434, section 2.1).

`engine.models.config` reads it once while a model loads. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.config_fields import positive_int
from penstock.errors import CheckpointError

LATENT_KEYS = frozenset(
    {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"}
)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The dimensions of latent attention, where all heads read one vector per token: `rank` values, from which each
    head derives its key and value, and `rope_dim` rotated ones. A page holds this vector in two halves, in the places
    of K and V."""

    rank: int
    q_rank: int | None  # None: one product computes the queries
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int  # of a head's query, and of the key that all heads share
    v_dim: int
    scale: float
    interleaved: bool = True  # the checkpoint rotates adjacent values, otherwise halves

    @property
    def page_head_dim(self) -> int:
        return (self.rank + self.rope_dim) // 2

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def parse_latent(data: Mapping[str, Any], num_heads: int, file: Path) -> LatentConfig:
    """Parses latent attention. Raises CheckpointError for inconsistent values."""
    rank, nope_dim, rope_dim, v_dim = (
        positive_int(data, key, file, None if key in data else default)
        for key, default in (
            ("kv_lora_rank", 512),
            ("qk_nope_head_dim", 128),
            ("qk_rope_head_dim", 64),
            ("v_head_dim", 128),
        )
    )
    for key, value in (("qk_rope_head_dim", rope_dim), ("kv_lora_rank", rank)):
        if value % 2:
            raise CheckpointError(f"{file}: {key} = {value} must be even, because halves are rotated and stored")
    if data.get("num_key_value_heads") not in (None, num_heads):
        raise CheckpointError(
            f"{file}: num_key_value_heads = {data['num_key_value_heads']!r}: with latent attention each of the "
            f"{num_heads} heads has its own; give that number"
        )
    has_q_rank = "q_lora_rank" not in data or data["q_lora_rank"] is not None
    return LatentConfig(
        rank=rank,
        q_rank=positive_int(data, "q_lora_rank", file, 1536) if has_q_rank else None,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
        interleaved=bool(data.get("rope_interleave", True)),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_magnitude(data) ** 2,
    )


def _yarn_magnitude(data: Mapping[str, Any]) -> float:
    """Returns the factor by which stretched contexts sharpen attention. `engine.models.rope_config` checks the
    values."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    mscale, factor = rope.get("mscale_all_dim") or 0, rope.get("factor", 1)
    if kind == "default" or not mscale or factor <= 1:
        return 1.0
    return 0.1 * float(mscale) * math.log(factor) + 1.0
