"""The bare-torch floor of a step: its matrix products with packed weights and one read of its KV, and nothing else.

What no serving system around torch can beat on this machine: no attention, no norms, no sampling, no scheduling.
Products and reads take turns layer by layer, as in a step, so that neither finds the other's data gone from the cache
more or less often than there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model_config import ModelConfig

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Floor:
    step_s: float


class FloorStep:
    """The floor of one step over `num_tokens` rows that draws `num_logits` tokens and reads `kv_tokens` positions."""

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
        # Every layer has weights of its own, as in a model: they do not stay in the cache from layer to layer.
        self._layers = [[_packed(out, wide, dtype) for wide, out in shapes] for _ in range(model.num_layers)]
        self._head = _packed(model.vocab_size, model.hidden_size, dtype)
        self._inputs = [torch.randn(num_tokens, wide).to(dtype) for wide, _ in shapes]
        self._drawing = torch.randn(num_logits, model.hidden_size).to(dtype)
        self._kv = torch.ones(model.num_layers, kv_tokens * 2 * kv_size, dtype=dtype).view(torch.int8)

    @torch.inference_mode()
    def __call__(self) -> None:
        product = torch.ops.mkldnn._linear_pointwise
        for layer, kv in zip(self._layers, self._kv, strict=True):
            for x, weight in zip(self._inputs, layer, strict=True):
                product(x, weight, None, "none", [], "")
            if len(kv):
                kv.max()
        product(self._drawing, self._head, None, "none", [], "")


def step_floor(model: ModelConfig, num_tokens: int, num_logits: int, kv_tokens: int, dtype: torch.dtype) -> Floor:
    return Floor(best_of(FloorStep(model, num_tokens, num_logits, kv_tokens, dtype)))


def best_of(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of the quickest of a few calls, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _packed(out: int, wide: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(out, wide).to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(weight)
