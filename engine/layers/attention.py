"""Implements the two kinds of attention layer: heads that store their K and V, and heads that share one latent vector.

Shapes: `T` tokens, `D` hidden, `N` query heads, `K` KV heads, `H` head dim, `A` all heads concatenated; for latents `C`
rank, `P` the part of a head that is not rotated, `R` the part that is, `V` value dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kernels.attention_interface import AttentionBackend, KvLayer, QkNorms
from engine.kernels.layer_ops import LayerOps
from engine.layers.adapted import ProductAdapters, multiply
from engine.layers.attention_inputs import AttentionInputs
from engine.layers.linear import LayerTensors, Linear, fuse
from engine.layers.norms import ProjectionNorms, read_norm
from engine.layers.rope import rotary_order
from engine.models.config import ModelConfig
from engine.models.latent_config import LatentConfig
from engine.weights.quantized_weight import in_order, join

_LATENT_EPS = 1e-6  # of the norms inside; the one in config.json is for the norms between blocks


class Attention(Protocol):
    out: Linear

    def attend(
        self,
        x_TD: torch.Tensor,
        inputs: AttentionInputs,
        kv: KvLayer,
        attention: AttentionBackend,
        ops: LayerOps,
        adapters: ProductAdapters | None = None,
    ) -> torch.Tensor:
        """Returns the heads' outputs, concatenated, [T, A], and writes the tokens' KV. `out` is the next product.
        Latent attention takes no adapters."""
        ...


class GroupedAttention:
    """Query heads in groups that share a head of K and V (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(
        self, config: ModelConfig, layer: int, read: LayerTensors, projection_norms: ProjectionNorms | None = None
    ) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self.window = config.head_dim, config.windows[layer]
        self._scale, self._softcap = config.attention_scale, config.attention_softcap
        self._projection_norms = projection_norms
        stored = ["qkv"] if config.family.fused_products else list("qkv")
        order_H = rotary_order(config.rope, config.head_dim)
        rows_O = None
        if order_H is not None:
            rows_O = projection_rows(self._num_heads, self._num_kv_heads, self._head_dim, order_H)
        self.qkv = fuse(read, [f"self_attn.{name}_proj" for name in stored], config.qkv_bias, rows_O)
        self.qk_norms: QkNorms | None = None
        if config.qk_norm and projection_norms is None:
            has_offset = config.family.norm_offset
            q_norm_H, k_norm_H = (read_norm(read(f"self_attn.{name}_norm.weight"), has_offset) for name in "qk")
            if order_H is not None:
                q_norm_H, k_norm_H = in_order(q_norm_H, order_H), in_order(k_norm_H, order_H)
            self.qk_norms = QkNorms(q_norm_H, k_norm_H, config.rms_norm_eps)
        self.sinks_N = read("self_attn.sinks") if config.family.sinks else None
        self.out = fuse(read, ["self_attn.o_proj"], config.o_bias)

    def attend(
        self,
        x_TD: torch.Tensor,
        inputs: AttentionInputs,
        kv: KvLayer,
        attention: AttentionBackend,
        ops: LayerOps,
        adapters: ProductAdapters | None = None,
    ) -> torch.Tensor:
        qkv_TX = multiply(self.qkv, x_TD, adapters, "qkv")
        if self._projection_norms is not None:
            qkv_TX = self._projection_norms(qkv_TX, ops)
        qkv_TXH = qkv_TX.view(-1, self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        norms = inputs.head_norms if self.qk_norms is None else self.qk_norms
        q_TNH = attention.store_qkv(qkv_TXH, inputs.cos_sin_T2H, norms, kv, inputs.meta, ops)
        if inputs.query_scale_T11 is not None:
            q_TNH = (q_TNH * inputs.query_scale_T11).to(q_TNH.dtype)
        return attention.paged_attention(
            q_TNH, kv.pages, inputs.meta, self._scale, self.window, self._softcap, kv.scales, self.sinks_N
        ).flatten(1)


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The projections from latents to keys and values are
    absorbed into the query and the output, so attention runs over the latents themselves and nothing is computed for
    each token of the context.

    A checkpoint may rotate adjacent values, while `LayerOps.rope` rotates halves: the weights' rows are reordered once.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, read: LayerTensors) -> None:
        self._latent, self._num_heads = latent, config.num_heads
        self._q_down: Linear | None = None
        if latent.q_rank is not None:
            self._q_down = Linear(read.weight("self_attn.q_a_proj.weight"))
            self._q_norm = read("self_attn.q_a_layernorm.weight")
        q_name = "self_attn.q_proj.weight" if latent.q_rank is None else "self_attn.q_b_proj.weight"
        q_NHI = read(q_name).unflatten(0, (config.num_heads, latent.query_dim))
        kv_XI = read("self_attn.kv_a_proj_with_mqa.weight")
        if latent.interleaved:
            q_NHI = _deinterleave(q_NHI, latent.rope_dim)
            kv_XI = _deinterleave(kv_XI[None], latent.rope_dim)[0]
        self._q, self._kv_down = Linear(q_NHI.flatten(0, 1)), Linear(kv_XI)
        self._kv_norm_C = read("self_attn.kv_a_layernorm.weight")
        kv_NXC = read("self_attn.kv_b_proj.weight").unflatten(0, (config.num_heads, latent.nope_dim + latent.v_dim))
        self._key_NPC = kv_NXC[:, : latent.nope_dim].contiguous()
        self._value_NCV = kv_NXC[:, latent.nope_dim :].transpose(1, 2).contiguous()
        self.out = Linear(read.weight("self_attn.o_proj.weight"))

    def attend(
        self,
        x_TD: torch.Tensor,
        inputs: AttentionInputs,
        kv: KvLayer,
        attention: AttentionBackend,
        ops: LayerOps,
        adapters: ProductAdapters | None = None,
    ) -> torch.Tensor:
        latent, cos_sin_T2H, meta = self._latent, inputs.cos_sin_T2H, inputs.meta
        down_TX = self._kv_down(x_TD)
        kv_TC = ops.rms_norm(down_TX[:, : latent.rank], self._kv_norm_C, _LATENT_EPS)
        k_T1R = ops.rope(down_TX[:, latent.rank :].unsqueeze(1), cos_sin_T2H)
        stored_T2H = torch.cat((kv_TC, k_T1R.squeeze(1)), dim=1).view(-1, 2, latent.page_head_dim)
        attention.write_kv(stored_T2H[:, :1], stored_T2H[:, 1:], kv.pages, meta, kv.scales)
        if self._q_down is not None:
            x_TD = ops.rms_norm(self._q_down(x_TD), self._q_norm, _LATENT_EPS)
        q_TNX = self._q(x_TD).view(-1, self._num_heads, latent.query_dim)
        q_NTC = torch.bmm(q_TNX[:, :, : latent.nope_dim].transpose(0, 1), self._key_NPC)
        q_TNH = torch.cat((q_NTC.transpose(0, 1), ops.rope(q_TNX[:, :, latent.nope_dim :], cos_sin_T2H)), dim=2)
        mixed_TNC = attention.latent_attention(q_TNH, kv.pages, meta, latent.scale, latent.rank, kv.scales)
        return torch.bmm(mixed_TNC.transpose(0, 1), self._value_NCV).transpose(0, 1).flatten(1)


def projection_rows(num_heads: int, num_kv_heads: int, head_dim: int, order_H: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a projection to queries, keys and values, with each query and key in the given order."""
    num_turned = (num_heads + num_kv_heads) * head_dim
    turned = torch.arange(0, num_turned, head_dim)[:, None] + order_H
    values = torch.arange(num_turned, num_turned + num_kv_heads * head_dim)
    return torch.cat((turned.flatten(), values))


def _deinterleave(weight_NOI: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Reorders the last `rope_dim` rows: the first row of each adjacent pair, then the second of each."""
    kept, rotated = weight_NOI[:, :-rope_dim], weight_NOI[:, -rope_dim:]
    return join((kept, rotated[:, 0::2], rotated[:, 1::2]), dim=1)
