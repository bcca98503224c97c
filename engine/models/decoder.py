"""The decoder of the Llama, Mistral and Qwen families, with experts too, parametrised by `ModelConfig`.

Runs in the middle of a step: `engine.runner` gives token ids and metadata and takes logits. It owns the weights; the KV
pages are the engine's, and only the attention backend writes them.

Shapes: `T` tokens of the batch, `D` hidden, `N` query heads, `K` KV heads, `H` head dim, `V` vocabulary,
`R` rows that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.kernels import AttentionBackend
from engine.kernels.metadata import AttentionMetadata
from engine.layers.feed_forward import DenseFeedForward, ExpertFeedForward, FeedForward
from engine.layers.linear import Linear
from engine.layers.ops import LayerOps
from engine.layers.rope import build_rope_table
from engine.model_config import ModelConfig
from engine.models.shapes import EMBEDDING, FINAL_NORM, HEAD, LAYERS_PREFIX
from engine.weights import WeightReader


class Decoder:
    """Token embedding, layers, final norm, output head."""

    def __init__(self, config: ModelConfig, reader: WeightReader, max_context: int, device: torch.device) -> None:
        self._eps = config.rms_norm_eps
        self._embedding_VD = reader.read(EMBEDDING)
        self._layers = [_Layer(config, reader, layer) for layer in range(config.num_layers)]
        self._norm_D = reader.read(FINAL_NORM)
        self._head = Linear(self._embedding_VD if config.tie_embeddings else reader.read(HEAD))
        self._rope_C2H = build_rope_table(config.rope, config.head_dim, max_context).to(device)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        draw_rows_R: torch.Tensor,
        meta: AttentionMetadata,
        layer_pools: Sequence[torch.Tensor],
        attention: AttentionBackend,
        ops: LayerOps,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Logits [R, V] of the tokens at `draw_rows_R`; writes the batch's K/V into `layer_pools`. `on_layer(n)` is
        called when the K/V of the first n layers are written, on a GPU: launched."""
        cos_sin_T2H = self._rope_C2H[positions_T]
        residual_TD = F.embedding(token_ids_T, self._embedding_VD)
        x_TD = ops.rms_norm(residual_TD, self._layers[0].input_norm_D, self._eps)
        for index, layer in enumerate(self._layers):
            mixed_TA = layer.attend(x_TD, cos_sin_T2H, meta, layer_pools[index], attention, ops)
            if on_layer is not None:
                on_layer(index + 1)
            if index + 1 == len(self._layers):  # from here on only the rows that draw matter
                if not len(draw_rows_R):
                    return residual_TD.new_empty((0, self._embedding_VD.shape[0]))
                mixed_TA, residual_TD = mixed_TA[draw_rows_R], residual_TD[draw_rows_R]
                next_norm_D = self._norm_D
            else:
                next_norm_D = self._layers[index + 1].input_norm_D
            x_TD, residual_TD = ops.add_rms_norm(layer.out(mixed_TA), residual_TD, layer.mlp_norm_D, self._eps)
            x_TD = layer.feed_forward(x_TD, ops)
            x_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, next_norm_D, self._eps)
        return self._head(x_TD)


class _Layer:
    """Weights of one layer, products that share an input fused, and its attention."""

    def __init__(self, config: ModelConfig, reader: WeightReader, layer: int) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._window = config.head_dim, config.windows[layer]
        self._scale, self._eps = config.head_dim**-0.5, config.rms_norm_eps
        prefix = f"{LAYERS_PREFIX}{layer}."

        def fused(block: str, names: Sequence[str], has_bias: bool) -> Linear:
            paths = [f"{prefix}{block}.{name}_proj" for name in names]
            weight = torch.cat([reader.read(f"{path}.weight") for path in paths])
            return Linear(weight, torch.cat([reader.read(f"{path}.bias") for path in paths]) if has_bias else None)

        self.input_norm_D = reader.read(f"{prefix}input_layernorm.weight")
        self._qkv = fused("self_attn", "qkv", config.qkv_bias)
        self._qk_norms_H: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.qk_norm:
            q_norm_H, k_norm_H = (reader.read(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
            self._qk_norms_H = (q_norm_H, k_norm_H)
        self.out = fused("self_attn", "o", config.o_bias)
        self.mlp_norm_D = reader.read(f"{prefix}post_attention_layernorm.weight")
        self.feed_forward: FeedForward
        if config.experts is not None and layer in config.experts.layers:
            self.feed_forward = ExpertFeedForward(config.experts, lambda name: reader.read(prefix + name))
        else:
            gate_up = fused("mlp", ("gate", "up"), config.mlp_bias)
            self.feed_forward = DenseFeedForward(gate_up, fused("mlp", ("down",), config.mlp_bias))

    def attend(
        self,
        x_TD: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        meta: AttentionMetadata,
        pool_layer: torch.Tensor,
        attention: AttentionBackend,
        ops: LayerOps,
    ) -> torch.Tensor:
        """The heads' outputs side by side, [T, N * H]."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        qkv_TXH = self._qkv(x_TD).view(-1, num_heads + 2 * num_kv_heads, self._head_dim)
        if self._qk_norms_H is None:
            qk_TXH = ops.rope(qkv_TXH[:, : num_heads + num_kv_heads], cos_sin_T2H)
            q_TNH, k_TKH = qk_TXH[:, :num_heads], qk_TXH[:, num_heads:]
        else:
            q_norm_H, k_norm_H = self._qk_norms_H
            q_TNH, k_TKH, _ = qkv_TXH.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            q_TNH = ops.rope(ops.rms_norm(q_TNH, q_norm_H, self._eps), cos_sin_T2H)
            k_TKH = ops.rope(ops.rms_norm(k_TKH, k_norm_H, self._eps), cos_sin_T2H)
        attention.write_kv(k_TKH, qkv_TXH[:, num_heads + num_kv_heads :], pool_layer, meta)
        return attention.paged_attention(q_TNH, pool_layer, meta, self._scale, self._window).flatten(1)
