"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864), from tables made once at load.

Shapes: `C` positions, `T` tokens, `N` heads, `H` head dim.
"""

from __future__ import annotations

import math

import torch

from engine.rope_config import RopeConfig


def build_rope_table(config: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """cos and sin of every position, float32 [C, 2, H / 2], the scaling's attention factor included."""
    positions_C = torch.arange(num_positions, dtype=torch.float32)
    angles = positions_C[:, None] * _inverse_frequencies(config, head_dim)[None, :]
    return torch.stack((angles.cos(), angles.sin()), dim=1) * config.attention_factor


def apply_rope(x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
    """Rotates every head by its token's position; `cos_sin_T2H` is [T, 2, H / 2] in x's dtype. Returns a new tensor."""
    cos, sin = cos_sin_T2H[:, 0, None], cos_sin_T2H[:, 1, None]
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.type == "linear":
        return plain / config.factor
    if config.type == "llama3":
        return _llama3_frequencies(plain, config)
    if config.type == "yarn":
        return _yarn_frequencies(plain, config, head_dim)
    return plain


def _llama3_frequencies(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = config.original_context * plain / (2 * math.pi)  # of each dimension over the trained context
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return torch.lerp(plain / config.factor, plain, kept.clamp(0, 1))


def _yarn_frequencies(plain: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2: interpolation "by parts"."""

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
