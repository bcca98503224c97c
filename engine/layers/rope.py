"""Builds the tables of rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864), once at load.

`LayerOps.rope` of `engine.kernels.layer_ops` rotates with them.

Shapes: `C` positions, `H` head dim.
"""

from __future__ import annotations

import math

import torch

from engine.models.rope_config import RopeConfig


def build_rope_table(config: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Returns cos and sin of every position, float32 [C, 2, H / 2], times the scaling's attention factor.

    Where only a part of a head is rotated, the other pairs get an angle of 0: heads must be in the order of
    `rotary_order`."""
    rotated_dim = config.rotated_dim or head_dim
    positions_C = torch.arange(num_positions, dtype=torch.float32)
    angles = positions_C[:, None] * _inverse_frequencies(config, rotated_dim)[None, :]
    table_C2H = torch.stack((angles.cos(), angles.sin()), dim=1) * config.attention_factor
    if rotated_dim == head_dim:
        return table_C2H
    kept_2H = torch.tensor([1.0, 0.0])[:, None].expand(2, (head_dim - rotated_dim) // 2)
    return torch.cat((table_C2H, kept_2H.expand(num_positions, -1, -1)), dim=2)


def rotary_order(config: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """Returns the order in which a head's values pair up as `LayerOps.rope` pairs them, int64 [H]: the first halves of
    the rotated and of the other values, then the second halves; or the first value of each adjacent pair, then the
    second. None: as they are stored.

    Scores do not depend on the order, as long as queries and keys have the same."""
    rotated_dim = config.rotated_dim
    if config.pairs_neighbours:
        return torch.arange(head_dim).view(-1, 2).T.flatten()
    if rotated_dim is None:
        return None
    rotated, kept = torch.arange(rotated_dim).chunk(2), torch.arange(rotated_dim, head_dim).chunk(2)
    return torch.cat((rotated[0], kept[0], rotated[1], kept[1]))


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.type == "linear":
        return plain / config.factor
    if config.type == "longrope":
        return 1.0 / (torch.tensor(config.wave_factors) * config.theta**exponents)
    if config.type == "llama3":
        return _llama3_frequencies(plain, config)
    if config.type == "yarn":
        return _yarn_frequencies(plain, config, head_dim)
    return plain


def _llama3_frequencies(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Returns Llama 3.1's frequencies: long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = config.original_context * plain / (2 * math.pi)  # of each dimension over the trained context
    width = config.high_freq_factor - config.low_freq_factor or 1e-9  # Llama 4 Scout has a step instead of a blend
    kept = (turns - config.low_freq_factor) / width
    return torch.lerp(plain / config.factor, plain, kept.clamp(0, 1))


def _yarn_frequencies(plain: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Interpolates "by parts" (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension_of(turns: float) -> float:
        ratio = config.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return torch.lerp(plain, plain / config.factor, stretched)
