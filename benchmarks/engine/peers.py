"""Runs the peers that `benchmarks.engine` compares the engine with: a decoder in plain eager torch, and `transformers`.

Each loads the same checkpoint and prepares calls for one decode step of a batch and for a whole prompt.

Shapes: `B` sequences, `T` tokens, `D` hidden, `N` query heads, `K` KV heads, `H` head dim, `C` context.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache
from transformers.cache_utils import StaticLayer

from benchmarks.common.timing import Stopwatch
from benchmarks.engine.workload import RequestBurst
from engine.kernels.layer_ops import apply_rope
from engine.layers.rope import build_rope_table
from engine.models.config import ModelConfig

Call = Callable[[], object]
_PREFIX = "model.layers."


class EagerTorch:
    """A straightforward Llama in torch: one operation after another, KV in contiguous tensors."""

    def __init__(self, folder: Path) -> None:
        self._config = ModelConfig.from_folder(str(folder))
        self._weights = load_file(folder / "model.safetensors")
        config = self._config
        self._rope = build_rope_table(config.rope, config.head_dim, config.context_length).to(torch.bfloat16)

    def decode(self, batch: int, context: int) -> Call:
        cache = self._cache(batch, context + 1)
        tokens = torch.full((batch, 1), 5)
        return lambda: self._forward(tokens, context, cache)

    def prefill(self, num_tokens: int) -> Call:
        cache = self._cache(1, num_tokens)
        tokens = torch.full((1, num_tokens), 5)
        return lambda: self._forward(tokens, 0, cache)

    def _cache(self, batch: int, size: int) -> torch.Tensor:
        config = self._config
        return torch.randn(config.num_layers, 2, batch, config.num_kv_heads, size, config.head_dim).bfloat16()

    @torch.inference_mode()
    def _forward(self, tokens_BT: torch.Tensor, start: int, cache: torch.Tensor) -> torch.Tensor:
        weights, eps = self._weights, self._config.rms_norm_eps
        x_BTD = F.embedding(tokens_BT, weights["model.embed_tokens.weight"])
        cos_sin = self._rope[start : start + tokens_BT.shape[1]]
        for layer in range(self._config.num_layers):
            norm = weights[f"{_PREFIX}{layer}.input_layernorm.weight"]
            x_BTD = x_BTD + self._attend(F.rms_norm(x_BTD, norm.shape, norm, eps), layer, start, cache[layer], cos_sin)
            norm = weights[f"{_PREFIX}{layer}.post_attention_layernorm.weight"]
            y_BTD = F.rms_norm(x_BTD, norm.shape, norm, eps)
            gate, up = (self._linear(y_BTD, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
            x_BTD = x_BTD + self._linear(F.silu(gate) * up, layer, "mlp.down_proj")
        norm = weights["model.norm.weight"]
        last_BD = F.rms_norm(x_BTD[:, -1], norm.shape, norm, eps)
        return F.linear(last_BD, weights["model.embed_tokens.weight"]).argmax(-1)

    def _attend(
        self, x_BTD: torch.Tensor, layer: int, start: int, cache: torch.Tensor, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        batch, count = x_BTD.shape[:2]
        q, k, v = (
            self._linear(x_BTD, layer, f"self_attn.{name}_proj").unflatten(-1, (-1, self._config.head_dim))
            for name in "qkv"
        )
        q, k = (
            apply_rope(x.flatten(0, 1), cos_sin.repeat(batch, 1, 1)).unflatten(0, (batch, count)).transpose(1, 2)
            for x in (q, k)
        )
        cache[0, :, :, start : start + count] = k
        cache[1, :, :, start : start + count] = v.transpose(1, 2)
        seen = cache[:, :, :, : start + count]
        out = F.scaled_dot_product_attention(q, seen[0], seen[1], is_causal=start == 0, enable_gqa=True)
        return self._linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")

    def _linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return F.linear(x, self._weights[f"{_PREFIX}{layer}.{name}.weight"])


class Transformers:
    """Transformers' forward over a static cache, as `generate` calls it for each token, and continuous batching."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def decode(self, batch: int, context: int) -> Call:
        return self._call(torch.full((batch, 1), 5), context)

    def prefill(self, num_tokens: int) -> Call:
        return self._call(torch.full((1, num_tokens), 5), 0)

    def _call(self, tokens_BT: torch.Tensor, start: int) -> Call:
        cache = StaticCache(config=self._model.config, max_cache_len=start + tokens_BT.shape[1])
        layers = cast(list[StaticLayer], cache.layers)

        @torch.inference_mode()
        def call() -> object:
            for layer in layers:
                layer.cumulative_length.fill_(start if layer.is_initialized else 0)
            positions = torch.arange(start, start + tokens_BT.shape[1])[None]
            out = self._model(
                input_ids=tokens_BT, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            return out.logits[:, -1].argmax(-1)

        return call

    def answer(self, burst: RequestBurst) -> float:
        """Returns the seconds of continuous batching."""
        config = GenerationConfig(
            max_new_tokens=burst.new_tokens, min_new_tokens=burst.new_tokens, do_sample=False, eos_token_id=-1
        )
        prompts = burst.prompts()
        with Stopwatch() as watch:
            outputs: dict[str, Any] = self._model.generate_batch(
                inputs=prompts, generation_config=config, progress_bar=False, warmup=False
            )
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        assert num_tokens == burst.new_tokens * burst.batch, f"{num_tokens} tokens came"
        return watch.seconds
