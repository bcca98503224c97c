"""The bare-torch floor of a step: its matrix products and one read of its KV, and nothing else.

What no serving system around torch can beat on this machine: no attention, no norms, no sampling, no scheduling.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine.model_config import ModelConfig

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds: `linear_s` of the matrix products, `kv_s` of reading the KV of every sequence once."""

    linear_s: float
    kv_s: float

    @property
    def step_s(self) -> float:
        return self.linear_s + self.kv_s


def step_floor(model: ModelConfig, num_tokens: int, num_logits: int, kv_tokens: int, dtype: torch.dtype) -> Floor:
    """Of one step over `num_tokens` rows that draws `num_logits` tokens and reads the KV of `kv_tokens` positions."""
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = model.intermediate_size
    shapes = [
        (model.hidden_size, q_size + 2 * kv_size),
        (q_size, model.hidden_size),
        (model.hidden_size, 2 * inner),
        (inner, model.hidden_size),
    ]
    # Every layer has weights of its own, as in a model: they do not stay in the cache from layer to layer.
    layers = [[torch.randn(out, wide).to(dtype) for wide, out in shapes] for _ in range(model.num_layers)]
    head = torch.randn(model.vocab_size, model.hidden_size).to(dtype)
    inputs = {wide: torch.randn(num_tokens, wide).to(dtype) for wide, _ in shapes}
    drawing = torch.randn(num_logits, model.hidden_size).to(dtype)

    def products() -> None:
        for layer in layers:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(drawing, head)

    kv = torch.ones(max(1, kv_tokens) * model.num_layers * 2 * kv_size, dtype=dtype)
    return Floor(best_of(products), best_of(lambda: kv.view(torch.int8).max()) if kv_tokens else 0.0)


def best_of(call: object) -> float:
    """Seconds of the quickest of a few calls, after one that does not count."""
    assert callable(call)
    call()
    times = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return min(times)
