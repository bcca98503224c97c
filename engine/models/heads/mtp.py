"""Implements the layer that predicts the token after the next one (MTP): DeepSeek-V3, arXiv:2412.19437, section 2.2.

The entry at position p joins the embedding of token p + 1 with the hidden state of token p, and predicts token p + 2.
A hidden state is what the output head reads: that of the target behind its final norm or, when several tokens are
drafted, the layer's own behind `shared_head.norm`, as SGLang passes it on. (vLLM passes it on as it is before that
norm, on which the layer was never trained.)

Shapes: `T` entries, `R` entries whose logits are wanted, `D` hidden, `V` vocabulary.
"""

from __future__ import annotations

import torch

from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, KvLayer
from engine.kernels.layer_ops import LayerOps
from engine.layers.attention_inputs import LayerInputs
from engine.layers.linear import Linear
from engine.models.decoder import DecoderLayer
from engine.models.heads.head import Embed, Project
from engine.models.heads.mtp_config import MtpConfig
from engine.parallel.collectives import SINGLE_RANK
from engine.weights.reader import WeightReader


class MtpHead:
    """Implements `Head`. Owns the layer's weights."""

    def __init__(
        self,
        config: MtpConfig,
        reader: WeightReader,
        max_context: int,
        device: torch.device,
        embed: Embed,
        project: Project,
    ) -> None:
        """`embed` looks up the target's embedding, `project` computes logits with its output head."""
        read = reader.within(config.prefix)
        self._embed, self._project, self._eps = embed, project, config.layer.rms_norm_eps
        self._embedding_norm_D, self._hidden_norm_D = read("enorm.weight"), read("hnorm.weight")
        self._join = Linear(read.weight("eh_proj.weight"))
        self._layer = DecoderLayer(config.layer, reader, config.index, config.layer, SINGLE_RANK)
        self._norm_D = read("shared_head.norm.weight")
        self._inputs = LayerInputs(config.layer, max_context, device)

    def combine(self, states_TX: torch.Tensor) -> torch.Tensor:
        return states_TX

    def forward(
        self,
        token_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        rows_R: torch.Tensor,
        meta: AttentionMetadata,
        kv: KvLayer,
        attention: AttentionBackend,
        ops: LayerOps,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, eps = self._layer, self._eps
        assert layer.input_norm_D is not None
        assert layer.mlp_norm_D is not None
        inputs = self._inputs.prepare(positions_T, meta, kv.pages.shape[3], hidden_TD.dtype)[-1]
        embedding_TD = ops.rms_norm(self._embed(token_ids_T), self._embedding_norm_D, eps)
        joined_TX = torch.cat((embedding_TD, ops.rms_norm(hidden_TD, self._hidden_norm_D, eps)), dim=1)
        residual_TD = self._join(joined_TX)
        x_TD = ops.rms_norm(residual_TD, layer.input_norm_D, eps)
        mixed_RA = layer.attention.attend(x_TD, inputs, kv, attention, ops)[rows_R]
        x_RD, residual_RD = ops.add_rms_norm(layer.attention.out(mixed_RA), residual_TD[rows_R], layer.mlp_norm_D, eps)
        hidden_RD, _ = ops.add_rms_norm(layer.feed_forward(x_RD, ops), residual_RD, self._norm_D, eps)
        return self._project(hidden_RD), hidden_RD
