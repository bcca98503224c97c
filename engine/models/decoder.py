"""Implements the decoder of every family, dense or with experts, with KV heads or latents, parametrised by
`ModelConfig`.

`engine.step.model_runner` passes token ids and metadata in each step and takes logits. The decoder owns the weights;
the engine owns the KV pages, and only the attention backend writes them.

Shapes: `T` tokens of the batch, `D` hidden, `N` query heads, `K` KV heads, `H` head dim, `V` vocabulary, `R` sampled
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.cpu.decoder_stack import DenseEnds, DenseLayer, DenseShape, DenseStack, LayerSlots, make_stack
from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, KvLayer
from engine.kernels.layer_ops import LayerOps
from engine.layers.adapted import RowAdapters, multiply
from engine.layers.attention import Attention, GroupedAttention, LatentAttention
from engine.layers.attention_inputs import LayerInputs
from engine.layers.feed_forward import DenseFeedForward, ExpertFeedForward, FeedForward
from engine.layers.hidden_taps import HiddenTaps
from engine.layers.linear import Linear
from engine.layers.norms import ProjectionNorms, read_norm
from engine.models.config import ModelConfig
from engine.models.shapes import EMBEDDING, FINAL_NORM, HEAD, LAYERS_PREFIX
from engine.parallel.collectives import SINGLE_RANK, ParallelGroup
from engine.parallel.shard import shard_model
from engine.weights.in_place import copy_weights, overwrite
from engine.weights.reader import WeightReader


class Decoder:
    """Token embedding, layers, final norm and output head."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        max_context: int,
        device: torch.device,
        group: ParallelGroup = SINGLE_RANK,
    ) -> None:
        """Reads this rank's part of the weights. `config` describes the whole model; `max_context` bounds positions."""
        self._config = config
        self._eps = config.rms_norm_eps
        self._group = group
        self._vocab_size = config.vocab_size
        self._own_vocab = group.shard.span(config.vocab_size)
        self._embedding_VD = reader.read(EMBEDDING)
        own = shard_model(config, group.shard)
        self._layers = [DecoderLayer(own, reader, layer, config, group) for layer in range(config.num_layers)]
        self._norm_D = read_norm(reader.read(FINAL_NORM), config.family.norm_offset)
        self._head = Linear(reader.head(HEAD, self._embedding_VD if config.tie_embeddings else None))
        self._dense_shape = DenseShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.attention_scale
        )
        self._inputs = LayerInputs(config, max_context, device)
        self._softcap = config.final_softcap
        self._embedding_scale: float | None = None
        if config.family.scaled_embedding:  # rounded as the embedding is
            self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=self._embedding_VD.dtype))

    def reload(self, reader: WeightReader) -> None:
        """Replaces all weights with those of `reader`, a layer at a time: no tensor moves, and at most one layer is in
        memory twice. After an error the model is unusable.
        """
        config = self._config
        embedding_VD = reader.read(EMBEDDING)
        head = Linear(reader.head(HEAD, embedding_VD if config.tie_embeddings else None))
        overwrite(self._embedding_VD, embedding_VD)
        copy_weights(self._head, head)
        del embedding_VD, head
        own = shard_model(config, self._group.shard)
        for index, layer in enumerate(self._layers):
            copy_weights(layer, DecoderLayer(own, reader, index, config, self._group))
        overwrite(self._norm_D, read_norm(reader.read(FINAL_NORM), config.family.norm_offset))

    def fuse(
        self,
        layer_pools: Sequence[KvLayer],
        attention: AttentionBackend,
        adapters: Sequence[LayerSlots] | None = None,
    ) -> DenseStack | None:
        """Returns the decoder as one call, with the adapter slots of each layer, or None if that is not supported:
        ranks, for instance, must exchange sums within each layer."""
        if self._group.shard.num_ranks > 1 or not self._inputs.is_uniform:
            return None
        if self._softcap is not None or self._embedding_scale is not None:
            return None
        layers = [layer.dense() for layer in self._layers]
        dense = [layer for layer in layers if layer is not None]
        whole = dense if len(dense) == len(layers) else None
        ends = DenseEnds(self._embedding_VD, self._inputs.rope_C2H, self._norm_D, self._head.tiles)
        return make_stack(attention, self._dense_shape, whole, layer_pools, ends, adapters)

    def make_taps(self, num_layers: Sequence[int], num_tokens: int) -> HiddenTaps:
        """Returns taps after these numbers of layers, for a step of `num_tokens`."""
        return HiddenTaps(num_layers, self._embedding_VD.new_empty((num_tokens, self._config.hidden_size)))

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        sampled_rows_R: torch.Tensor,
        meta: AttentionMetadata,
        layer_pools: Sequence[KvLayer],
        attention: AttentionBackend,
        ops: LayerOps,
        on_layer: Callable[[int], None] | None = None,
        stack: DenseStack | None = None,
        adapters: RowAdapters | None = None,
        on_start: Callable[[], None] | None = None,
        taps: HiddenTaps | None = None,
        all_rows: bool = False,
    ) -> torch.Tensor:
        """Returns logits [R, V] of the tokens at `sampled_rows_R`, and writes the batch's K and V into `layer_pools`
        and its hidden states into `taps`: after all layers, those behind the final norm, for which `all_rows` lets the
        last layer compute every token. All ranks pass the same `all_rows`.

        Calls `on_start()` before it computes, and `on_layer(n)` when the K and V of the first n layers are written (on
        a GPU: when the writes are launched).
        `stack` is the result of `fuse`."""
        if stack is not None and not all_rows:
            slot_T = None if adapters is None else adapters.slot_T
            output_RX = stack.forward(token_ids_T, positions_T, sampled_rows_R, meta, on_layer, on_start, slot_T, taps)
            return output_RX if stack.has_head else self._head(output_RX)
        if on_start is not None:
            on_start()
        residual_TD = self.embed(token_ids_T)
        inputs = self._inputs.prepare(positions_T, meta, layer_pools[0].pages.shape[3], residual_TD.dtype)
        first_norm_D = self._layers[0].input_norm_D
        x_TD = residual_TD if first_norm_D is None else ops.rms_norm(residual_TD, first_norm_D, self._eps)
        for index, layer in enumerate(self._layers):
            own = None if adapters is None else adapters.layer(index)
            if taps is not None:
                taps.keep(index, residual_TD)
            mixed_TA = layer.attention.attend(x_TD, inputs[index], layer_pools[index], attention, ops, own)
            if on_layer is not None:
                on_layer(index + 1)
            is_last = index + 1 == len(self._layers)
            if is_last and not all_rows:  # from here on only the sampled rows matter
                if not len(sampled_rows_R):
                    return residual_TD.new_empty((0, self._vocab_size))
                mixed_TA, residual_TD = mixed_TA[sampled_rows_R], residual_TD[sampled_rows_R]
                own = None if adapters is None else adapters.select(sampled_rows_R).layer(index)
            next_norm_D = self._norm_D if is_last else self._layers[index + 1].input_norm_D
            x_TD = self._group.sum(multiply(layer.attention.out, mixed_TA, own, "out"))
            x_TD, residual_TD = self._add(ops, x_TD, residual_TD, layer.attention_output_norm_D, layer.mlp_norm_D)
            x_TD = self._group.sum(layer.feed_forward(x_TD, ops, own))
            x_TD, residual_TD = self._add(ops, x_TD, residual_TD, layer.mlp_output_norm_D, next_norm_D)
        if taps is not None:
            taps.keep(len(self._layers), x_TD)
        if all_rows:
            if not len(sampled_rows_R):
                return x_TD.new_empty((0, self._vocab_size))
            x_TD = x_TD[sampled_rows_R]
        return self.project(x_TD)

    def project(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Returns the logits [R, V] of hidden states behind the final norm; all ranks must call it."""
        return self._join_logits(self._cap(self._head(x_RD)))

    def _cap(self, logits_RV: torch.Tensor) -> torch.Tensor:
        if self._softcap is None:
            return logits_RV
        return torch.tanh(logits_RV / self._softcap) * self._softcap

    def _add(
        self,
        ops: LayerOps,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        output_norm_D: torch.Tensor | None,
        next_norm_D: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a block's output to the residual. Returns what the next block reads, and the residual."""
        if output_norm_D is not None:
            x_TD = ops.rms_norm(x_TD, output_norm_D, self._eps)
        if next_norm_D is not None:
            return ops.add_rms_norm(x_TD, residual_TD, next_norm_D, self._eps)
        residual_TD = x_TD + residual_TD
        return residual_TD, residual_TD

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embeds tokens, and scales them in families that do so."""
        x_TD = self._look_up(token_ids_T)
        return x_TD if self._embedding_scale is None else x_TD.mul_(self._embedding_scale)

    def _look_up(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor; each rank looks up the tokens of its part of the vocabulary."""
        if self._group.shard.num_ranks == 1:
            return F.embedding(token_ids_T, self._embedding_VD)
        local_T = token_ids_T - self._own_vocab.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self._own_vocab))
        x_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self._embedding_VD)
        return self._group.sum(x_TD.masked_fill_(elsewhere_T[:, None], 0.0))

    def _join_logits(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the whole vocabulary on rank 0, and an unspecified part on other ranks."""
        shard = self._group.shard
        if shard.num_ranks == 1:
            return logits_RV
        missing = -(-self._vocab_size // shard.num_ranks) - logits_RV.shape[1]  # of the last rank's part
        joined_RV = self._group.join_columns(F.pad(logits_RV, (0, missing)) if missing else logits_RV)
        return joined_RV[:, : self._vocab_size]


class DecoderLayer:
    """A layer: attention, feed-forward, and the norms before and after each."""

    def __init__(
        self, config: ModelConfig, reader: WeightReader, layer: int, whole: ModelConfig, group: ParallelGroup
    ) -> None:
        """`config` describes this rank's part of the `whole` model."""
        read = reader.within(f"{LAYERS_PREFIX}{layer}.")
        has_offset = config.family.norm_offset
        norms = [
            None if name is None else read_norm(read(f"{name}.weight"), has_offset) for name in config.family.norms
        ]
        self.input_norm_D, self.mlp_norm_D, self.attention_output_norm_D, self.mlp_output_norm_D = norms
        self.attention: Attention
        if config.latent is not None:
            self.attention = LatentAttention(config, config.latent, read)
        else:
            wide = ProjectionNorms(whole, read, group) if config.family.wide_qk_norm else None
            self.attention = GroupedAttention(config, layer, read, wide)
        self.feed_forward: FeedForward
        if config.experts is not None and layer in config.experts.layers:
            self.feed_forward = ExpertFeedForward(config.experts, read)
        else:
            family = config.family
            self.feed_forward = DenseFeedForward(
                read, family.dense_block, has_bias=config.mlp_bias, is_fused=family.fused_products, is_gelu=family.gelu
            )

    def dense(self) -> DenseLayer | None:
        """Returns the weights for the kernel that runs all layers, or None for a layer that it does not support."""
        attention, mlp = self.attention, self.feed_forward
        if self.input_norm_D is None or self.mlp_norm_D is None or self.attention_output_norm_D is not None:
            return None
        if not isinstance(attention, GroupedAttention) or not isinstance(mlp, DenseFeedForward) or mlp.is_gelu:
            return None
        qkv, out, gate_up, down = attention.qkv.tiles, attention.out.tiles, mlp.gate_up.tiles, mlp.down.tiles
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        norms = None if attention.qk_norms is None else (attention.qk_norms.q_H, attention.qk_norms.k_H)
        return DenseLayer(self.input_norm_D, qkv, norms, out, self.mlp_norm_D, gate_up, down, attention.window)
