"""Finds the sizes that determine a model's costs, from a `config.json` or by name, without weights or torch.

`engine.models.config` decides whether the engine can serve a checkpoint. This module only reads widths, so it accepts
any decoder with the usual keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput
from penstock.sizing.language_model import language_model_config


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and counts of a decoder; weights and KV in bytes per value."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    ties_embeddings: bool = False
    num_experts: int = 0
    num_chosen: int = 0  # experts chosen for each token
    expert_size: int = 0
    shared_size: int = 0  # width of the shared expert, which every token passes through
    num_dense_layers: int = 0  # layers without experts in a model that has experts
    latent_rank: int = 0  # above 0: latent attention (DeepSeek-V2, arXiv:2405.04434)
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    q_rank: int = 0
    window: int = 0  # tokens that windowed layers attend to
    num_window_layers: int = 0
    weight_bytes_per_value: float = 2.0
    kv_bytes_per_value: float = 2.0
    coded_expert_bytes: float | None = None  # bytes per value of specially encoded experts; None: like other weights

    def quantized(self, weight_bits: int | None = None, kv_bits: int | None = None) -> ModelShape:
        """Returns the shape with other widths of weights and KV. Specially encoded experts keep their encoding unless
        the weights are float32, for which they are decoded.
        """
        return replace(
            self,
            weight_bytes_per_value=weight_bits / 8 if weight_bits else self.weight_bytes_per_value,
            kv_bytes_per_value=kv_bits / 8 if kv_bits else self.kv_bytes_per_value,
            coded_expert_bytes=None if weight_bits == 32 else self.coded_expert_bytes,
        )

    def with_decoded_experts(self) -> ModelShape:
        """Returns the shape for devices that cannot multiply with the experts' codes."""
        return replace(self, coded_expert_bytes=None)

    # Parameters.

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_parameters(self) -> int:
        """Returns the parameters of one layer's attention."""
        hidden, heads = self.hidden_size, self.num_heads
        if self.latent_rank:
            query = heads * (self.nope_dim + self.rope_dim)
            queries = (hidden + query) * self.q_rank if self.q_rank else hidden * query
            latents = hidden * (self.latent_rank + self.rope_dim)
            return (
                queries
                + latents
                + heads * (self.nope_dim + self.v_dim) * self.latent_rank
                + heads * self.v_dim * hidden
            )
        return hidden * self.head_dim * (2 * heads + 2 * self.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Returns the parameters of all experts of all layers."""
        return self.num_expert_layers * self.num_experts * 3 * self.hidden_size * self.expert_size

    @property
    def always_read_parameters(self) -> int:
        """Returns the parameters that every step reads: all but the experts and the embedding, of which it only reads
        rows.
        """
        hidden = self.hidden_size
        dense = (self.num_layers - self.num_expert_layers) * 3 * hidden * self.intermediate_size
        shared = self.num_expert_layers * (3 * hidden * self.shared_size + hidden * self.num_experts)
        return self.num_layers * self.attention_parameters + dense + shared + hidden * self.vocab_size

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.ties_embeddings else self.hidden_size * self.vocab_size
        return self.always_read_parameters + self.expert_parameters + embedding

    @property
    def active_parameters(self) -> int:
        """Returns the number of parameters that one token is multiplied with."""
        chosen = self.num_expert_layers * self.num_chosen * 3 * self.hidden_size * self.expert_size
        return self.always_read_parameters + chosen

    @property
    def weight_bytes(self) -> float:
        others = self.num_parameters - self.expert_parameters
        return others * self.weight_bytes_per_value + self.expert_bytes

    @property
    def expert_bytes(self) -> float:
        """Returns the bytes of all experts of all layers, as a device holds them."""
        coded = self.coded_expert_bytes
        return self.expert_parameters * (self.weight_bytes_per_value if coded is None else coded)

    # KV and attention.

    @property
    def layer_kv_bytes(self) -> float:
        """Returns the KV bytes of one token in one layer."""
        values = self.latent_rank + self.rope_dim if self.latent_rank else 2 * self.num_kv_heads * self.head_dim
        return values * self.kv_bytes_per_value

    @property
    def kv_token_bytes(self) -> float:
        """Returns the KV bytes of one token in all layers, as pages hold it: windowed layers keep all of it too."""
        return self.num_layers * self.layer_kv_bytes

    @property
    def num_full_layers(self) -> int:
        """Returns the number of layers that attend to the whole context."""
        return self.num_layers - self.num_window_layers

    def layer_attention_flops(self, *, of_prompts: bool) -> float:
        """Returns the attention FLOPs of one token over one token of its context, in one layer.

        Decode steps multiply with latents as they are stored; prompts expand them first, which is cheaper for them.
        """
        if not self.latent_rank:
            return 4.0 * self.num_heads * self.head_dim
        values = self.nope_dim + self.v_dim if of_prompts else 2 * self.latent_rank
        return 2.0 * self.num_heads * (values + self.rope_dim)

    @property
    def token_flops(self) -> float:
        """Returns the FLOPs of one token without attention over its context."""
        return 2.0 * self.active_parameters


def _named(*shapes: ModelShape) -> dict[str, ModelShape]:
    return {shape.name: shape for shape in shapes}


# Published configurations (Hugging Face `config.json` of the models of these names).
MODEL_SHAPES = _named(
    ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    ModelShape("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, 131072),
    ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960),
    ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 40960),
    ModelShape(
        "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, 40960, num_experts=128, num_chosen=8, expert_size=768
    ),
    ModelShape(
        "mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, num_experts=8, num_chosen=2, expert_size=14336
    ),
    ModelShape(
        "deepseek-v3", 61, 7168, 128, 128, 128, 18432, 129280, 163840,
        num_experts=256, num_chosen=8, expert_size=2048, shared_size=2048, num_dense_layers=3,
        latent_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536, weight_bytes_per_value=1.0,
    ),
)  # fmt: skip


def find_shape(name: str) -> ModelShape:
    """Returns the shape of a known name, a checkpoint folder or a `config.json`. Raises InvalidInput."""
    if name.lower() in MODEL_SHAPES:
        return MODEL_SHAPES[name.lower()]
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = ", ".join(MODEL_SHAPES)
        raise InvalidInput(
            "model", f"{name!r} is neither a config.json nor a known shape; give a folder, or one of {known}"
        )
    try:
        data = json.loads(file.read_text())
        return shape_from_config(data, path.name if path.is_dir() else path.parent.name)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput("model", f"{file}: {error!r}; expected a decoder's config.json") from error


def shape_from_config(data: Mapping[str, Any], name: str) -> ModelShape:
    """Returns the shape that a `config.json` describes. Raises KeyError for a missing width."""
    data = language_model_config(data)
    heads, hidden, layers = int(data["num_attention_heads"]), int(data["hidden_size"]), int(data["num_hidden_layers"])
    experts = next((int(data[key]) for key in _EXPERT_COUNTS if data.get(key)), 0)
    expert_size = int(data.get("moe_intermediate_size") or data["intermediate_size"]) if experts else 0
    window, num_window_layers = _windows(data, layers)
    is_llama4 = data.get("model_type") == "llama4_text"
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or hidden // heads),
        intermediate_size=int(data.get("intermediate_size_mlp") or data["intermediate_size"]),
        vocab_size=int(data["vocab_size"]),
        context_length=int(data["max_position_embeddings"]),
        ties_embeddings=bool(data.get("tie_word_embeddings", str(data.get("model_type")) in _TIED)),
        num_experts=experts,
        num_chosen=int(data.get("num_experts_per_tok") or data.get("experts_per_token") or 0) if experts else 0,
        expert_size=expert_size,
        shared_size=int(data.get("n_shared_experts") or is_llama4) * expert_size,
        num_dense_layers=_num_dense_layers(data, layers) if experts else 0,
        latent_rank=int(data.get("kv_lora_rank") or 0),
        rope_dim=int(data.get("qk_rope_head_dim") or 0),
        nope_dim=int(data.get("qk_nope_head_dim") or 0),
        v_dim=int(data.get("v_head_dim") or 0),
        q_rank=int(data.get("q_lora_rank") or 0),
        window=window,
        num_window_layers=num_window_layers,
        weight_bytes_per_value=_weight_bytes(data),
        kv_bytes_per_value=float(_DTYPE_BYTES.get(str(data.get("torch_dtype") or data.get("dtype")), 2)),
        coded_expert_bytes=_MXFP4_BYTES if experts and _method(data) == "mxfp4" else None,
    )


# Without layer_types, every n-th layer has no window.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
_TIED = ("gemma2", "gemma3_text")  # models that tie embeddings by default
_MXFP4_BYTES = 1 + 4 / 32  # bytes per value in the engine: an fp8 code, and a float32 scale per 32 values
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def _num_dense_layers(data: Mapping[str, Any], num_layers: int) -> int:
    if (step := int(data.get("interleave_moe_layer_step") or 1)) > 1:
        return num_layers - num_layers // step
    return int(data.get("first_k_dense_replace") or 0)


def _windows(data: Mapping[str, Any], num_layers: int) -> tuple[int, int]:
    """Returns the window in tokens and the number of layers that have it."""
    if chunk := data.get("attention_chunk_size"):  # a token sees half of its chunk on average
        kinds = data.get("layer_types") or ["chunked_attention" if rotates else "" for rotates in _rotating(data)]
        return int(chunk) // 2, sum(kind == "chunked_attention" for kind in kinds)
    window = data.get("sliding_window")
    if not window or data.get("use_sliding_window") is False:
        return 0, 0
    kinds = data.get("layer_types")
    if isinstance(kinds, list):
        return int(window), sum(kind == "sliding_attention" for kind in kinds)
    if pattern := data.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(str(data.get("model_type"))):
        return int(window), num_layers - num_layers // int(pattern)
    return int(window), num_layers


def _rotating(data: Mapping[str, Any]) -> list[int]:
    """Returns 1 for each layer of a Llama 4 that rotates queries and keys, and 0 for the others."""
    interval = int(data.get("no_rope_layer_interval") or 4)
    return data.get("no_rope_layers") or [int((n + 1) % interval != 0) for n in range(int(data["num_hidden_layers"]))]


def _weight_bytes(data: Mapping[str, Any]) -> float:
    if _method(data) == "fp8":
        return 1.0
    if bits := (data.get("quantization_config") or {}).get("bits"):
        return float(bits) / 8
    return float(_DTYPE_BYTES.get(str(data.get("torch_dtype") or data.get("dtype")), 2))


def _method(data: Mapping[str, Any]) -> str | None:
    return (data.get("quantization_config") or {}).get("quant_method")
