"""Implements an EAGLE-3 head: a decoder layer whose attention reads a token's embedding beside the hidden state of the
token before it (Li et al. 2025, arXiv:2503.01840).

The entry at position p joins the hidden state of token p with the embedding of token p + 1, and predicts token p + 2.
Hidden states of the target are three layers' residuals, which `combine` maps to one; the head's own output is the
hidden state of the next entry when several tokens are drafted.

Shapes: `T` entries, `R` entries whose logits are wanted, `D` hidden, `X` a target's hidden states, `V` vocabulary of
the target, `W` of the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, KvLayer
from engine.kernels.layer_ops import LayerOps
from engine.layers.attention import GroupedAttention
from engine.layers.attention_inputs import LayerInputs
from engine.layers.feed_forward import DenseFeedForward
from engine.layers.linear import Linear
from engine.models.heads.head import Embed
from engine.models.heads.head_config import HEAD_EMBEDDING, HeadConfig
from engine.weights.reader import WeightReader


class Eagle3Head:
    """Implements `Head`. Owns the head's weights."""

    def __init__(
        self,
        config: HeadConfig,
        reader: WeightReader,
        max_context: int,
        device: torch.device,
        target_ids_W: torch.Tensor | None,
        embed: Embed | None,
    ) -> None:
        """`target_ids_W` has the target's token for each token of the head; None: they are the same. `embed` looks up
        the target's embedding; it is needed if the head has none."""
        layer = config.layer
        self._eps, self._norms_residual = layer.rms_norm_eps, config.norm_before_residual
        self._vocab_size, self._target_ids_W = layer.vocab_size, target_ids_W
        if config.has_embedding:
            embedding_VD = reader.read(HEAD_EMBEDDING)
            self._embed: Embed = lambda token_ids_T: F.embedding(token_ids_T, embedding_VD)
        else:
            assert embed is not None
            self._embed = embed
        read = reader.within(config.layer_prefix)
        self._fc = Linear(reader.weight("fc.weight"))
        self._embedding_norm_D, self._hidden_norm_D = read("input_layernorm.weight"), read("hidden_norm.weight")
        self._attention = GroupedAttention(layer, 0, read)
        self._mlp_norm_D = read("post_attention_layernorm.weight")
        self._feed_forward = DenseFeedForward(read, "mlp", has_bias=layer.mlp_bias)
        self._norm_D = reader.read("norm.weight")
        self._head = Linear(reader.head("lm_head.weight", None))
        self._inputs = LayerInputs(layer, max_context, device)

    def combine(self, states_TX: torch.Tensor) -> torch.Tensor:
        return self._fc(states_TX)

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
        """See `Head.forward`. Tokens that the head does not know have a logit of minus infinity."""
        inputs = self._inputs.prepare(positions_T, meta, kv.pages.shape[3], hidden_TD.dtype)[0]
        embedding_TD = ops.rms_norm(self._embed(token_ids_T), self._embedding_norm_D, self._eps)
        normed_TD = ops.rms_norm(hidden_TD, self._hidden_norm_D, self._eps)
        residual_TD = normed_TD if self._norms_residual else hidden_TD
        x_TX = torch.cat((embedding_TD, normed_TD), dim=1)
        mixed_TA = self._attention.attend(x_TX, inputs, kv, attention, ops)[rows_R]
        x_RD, residual_RD = ops.add_rms_norm(
            self._attention.out(mixed_TA), residual_TD[rows_R], self._mlp_norm_D, self._eps
        )
        hidden_RD = self._feed_forward(x_RD, ops) + residual_RD
        return self._spread(self._head(ops.rms_norm(hidden_RD, self._norm_D, self._eps))), hidden_RD

    def _spread(self, logits_RW: torch.Tensor) -> torch.Tensor:
        """Returns the logits by the target's token ids."""
        if self._target_ids_W is None:
            return logits_RW
        logits_RV = logits_RW.new_full((len(logits_RW), self._vocab_size), float("-inf"))
        logits_RV[:, self._target_ids_W] = logits_RW
        return logits_RV
