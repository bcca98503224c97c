"""Defines what a head computes, whichever its kind.

Shapes: `T` entries, `R` entries whose logits are wanted, `D` hidden, `X` a target's hidden states, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, KvLayer
from engine.kernels.layer_ops import LayerOps

Embed = Callable[[torch.Tensor], torch.Tensor]  # token ids [T] -> embeddings [T, D]
Project = Callable[[torch.Tensor], torch.Tensor]  # hidden states [R, D] -> logits [R, V]


class Head(Protocol):
    """Predicts further tokens from a target's hidden states. Implemented by `Eagle3Head` and `MtpHead`.

    Attention sees the entries in the order in which they were stored, so some may be missing.
    """

    def combine(self, states_TX: torch.Tensor) -> torch.Tensor:
        """Returns what `forward` reads of a target's hidden states, [T, D]."""
        ...

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
        """Returns the logits [R, V] of the entries at `rows_R`, and their hidden states [R, D]."""
        ...
