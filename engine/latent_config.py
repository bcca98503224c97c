"""What `config.json` says of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Read once while a model loads (`engine.model_config`). Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError

LATENT_KEYS = frozenset(
    {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"}
)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """All heads read one vector a token: `rank` values, from which each makes its key and value, and `rope_dim` that
    are rotated. It is what a page holds, half of it where other models have K and half where they have V."""

    rank: int
    q_rank: int | None  # None: queries are made in one product
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int  # of a head's query, and of the key that all share
    v_dim: int
    scale: float
    interleaved: bool = True  # the checkpoint rotates neighbours, else halves

    @property
    def page_head_dim(self) -> int:
        return (self.rank + self.rope_dim) // 2

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def parse_latent(data: Mapping[str, Any], num_heads: int, file: Path) -> LatentConfig:
    """Raises CheckpointError on what makes no sense."""
    rank, nope_dim, rope_dim, v_dim = (
        _positive(data, key, default, file)
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
        q_rank=_positive(data, "q_lora_rank", 1536, file) if has_q_rank else None,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
        interleaved=bool(data.get("rope_interleave", True)),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_magnitude(data) ** 2,
    )


def _yarn_magnitude(data: Mapping[str, Any]) -> float:
    """Stretched contexts sharpen the attention; `engine.rope_config` has checked the numbers."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    mscale, factor = rope.get("mscale_all_dim") or 0, rope.get("factor", 1)
    if kind == "default" or not mscale or factor <= 1:
        return 1.0
    return 0.1 * float(mscale) * math.log(factor) + 1.0


def _positive(data: Mapping[str, Any], key: str, default: int, file: Path) -> int:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{file}: {key} = {value!r}: a positive whole number is needed")
    return value
