"""Times the bare-torch floor of a step: its matrix products with packed weights and one read of its KV, nothing else.

No serving system around torch can be faster on this machine: the floor has no attention, no norms, no sampling and no
scheduling. Products and KV reads alternate layer by layer, as in a step, so that they evict each other's data from the
CPU cache as often as they do there.
"""

from __future__ import annotations

import torch

from benchmarks.common.timing import best_s
from engine.models.config import ModelConfig


class FloorStep:
    """The floor of a step over `num_tokens` rows that samples `num_logits` tokens and reads `kv_tokens` positions."""

    def __init__(
        self, model: ModelConfig, num_tokens: int, num_logits: int, kv_tokens: int, dtype: torch.dtype
    ) -> None:
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        inner = model.intermediate_size
        shapes = [
            (model.hidden_size, q_size + 2 * kv_size),
            (q_size, model.hidden_size),
            (model.hidden_size, 2 * inner),
            (inner, model.hidden_size),
        ]
        # Every layer has its own weights, as in a model, so that they do not stay in the CPU cache between layers.
        self._layers = [[_packed(out, wide, dtype) for wide, out in shapes] for _ in range(model.num_layers)]
        self._head = _packed(model.vocab_size, model.hidden_size, dtype)
        self._inputs = [torch.randn(num_tokens, wide).to(dtype) for wide, _ in shapes]
        self._sampled = torch.randn(num_logits, model.hidden_size).to(dtype)
        self._kv = torch.ones(model.num_layers, kv_tokens * 2 * kv_size, dtype=dtype).view(torch.int8)

    @torch.inference_mode()
    def __call__(self) -> None:
        product = torch.ops.mkldnn._linear_pointwise
        for layer, kv in zip(self._layers, self._kv, strict=True):
            for x, weight in zip(self._inputs, layer, strict=True):
                product(x, weight, None, "none", [], "")
            if len(kv):
                kv.max()
        product(self._sampled, self._head, None, "none", [], "")


def step_floor_s(model: ModelConfig, num_tokens: int, num_logits: int, kv_tokens: int, dtype: torch.dtype) -> float:
    """Returns the seconds of the quickest of a few floor steps."""
    return best_s(FloorStep(model, num_tokens, num_logits, kv_tokens, dtype))


def _packed(out: int, wide: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(out, wide).to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(weight)
