"""Reads the weights of norms, and computes norms of queries and keys that span all heads of a token, over all ranks.

Shapes: `T` tokens, `D` hidden or head dim, `W` values of the queries or keys that a rank holds, `X` values of a
projection.
"""

from __future__ import annotations

import torch

from engine.kernels.layer_ops import LayerOps
from engine.layers.linear import LayerTensors
from engine.models.config import ModelConfig
from engine.parallel.collectives import ParallelGroup


def read_norm(tensor_D: torch.Tensor, has_offset: bool) -> torch.Tensor:
    """Returns the factor of a norm: the stored weight or, in families that store its difference from 1 (Gemma), their
    sum in float32, because bf16 would round it.
    """
    if not has_offset:
        return tensor_D
    return torch.empty_like(tensor_D, dtype=torch.float32) if tensor_D.is_meta else tensor_D.float() + 1.0


class ProjectionNorms:
    """Normalises queries by the root mean square of all query heads, and keys by that of all KV heads (OLMo-2,
    arXiv:2501.00656)."""

    def __init__(self, model: ModelConfig, read: LayerTensors, group: ParallelGroup) -> None:
        """`model` describes the whole model, `read` this rank's tensors."""
        self._q_W, self._k_W = (read(f"self_attn.{name}_norm.weight") for name in "qk")
        self._eps, self._group = model.rms_norm_eps, group
        self._q_width, self._k_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._copies = max(1, group.shard.num_ranks // model.num_kv_heads)  # ranks that hold the same KV head

    def __call__(self, qkv_TX: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """Returns the projection with its queries and keys normalised; blocks on a CPU if there are several ranks."""
        q_width, k_width = len(self._q_W), len(self._k_W)
        q_TW, k_TW, v_TW = qkv_TX.split((q_width, k_width, qkv_TX.shape[1] - q_width - k_width), dim=1)
        if self._group.shard.num_ranks == 1:
            q_TW, k_TW = ops.rms_norm(q_TW, self._q_W, self._eps), ops.rms_norm(k_TW, self._k_W, self._eps)
            return torch.cat((q_TW, k_TW, v_TW), dim=1)
        q_float_TW, k_float_TW = q_TW.float(), k_TW.float()
        squares_T2 = torch.stack((q_float_TW.square().sum(1), k_float_TW.square().sum(1) / self._copies), dim=1)
        squares_T2 = self._group.sum(squares_T2)
        q_TW = _scale(q_float_TW, squares_T2[:, :1] / self._q_width, self._q_W, self._eps)
        k_TW = _scale(k_float_TW, squares_T2[:, 1:] / self._k_width, self._k_W, self._eps)
        return torch.cat((q_TW, k_TW, v_TW), dim=1)


def _scale(x_TW: torch.Tensor, mean_T1: torch.Tensor, weight_W: torch.Tensor, eps: float) -> torch.Tensor:
    return (x_TW * torch.rsqrt(mean_T1 + eps) * weight_W.float()).to(weight_W.dtype)
