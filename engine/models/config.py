"""Parses a checkpoint folder's description of its model, once while a worker starts.

`ModelConfig.from_folder` is the only reader of `config.json` and `generation_config.json`. Torch-free. It refuses
settings that would change results and are unknown here, because a model that answers slightly wrong is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.cache.kv_layout import DTYPE_BYTES
from engine.models.config_fields import positive_int, read_json
from engine.models.expert_config import ExpertConfig, parse_experts
from engine.models.families import PREDICTION_KEYS, Family, find_family, refuse_unknown
from engine.models.latent_config import LatentConfig, parse_latent
from engine.models.rope_config import RopeConfig, parse_rope
from engine.weights.checkpoint import CONFIG_FILE, checkpoint_revision
from engine.weights.quantization_config import WeightScheme, parse_scheme
from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, and the folder's defaults for generation."""

    family: Family
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int  # tokens
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # for each layer, tokens that a query sees, itself included; None: all
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    mlp_bias: bool
    experts: ExpertConfig | None
    latent: LatentConfig | None  # with latents, num_kv_heads and head_dim describe the halves that pages hold
    dtype: str  # of config.json; float32 by default
    eos_token_ids: frozenset[int]
    revision: str  # changes whenever the configuration or the weights do
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    num_prediction_layers: int = 0  # stored after the last layer, to predict further tokens; not run
    scheme: WeightScheme | None = None  # None: the checkpoint's weights are plain

    @property
    def rope_dim(self) -> int:
        """How many values of a head the tables of the rotary embedding cover."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Parses a Hugging Face checkpoint folder. Raises CheckpointError, which names the file, the value and the
        fix."""
        folder = Path(path)
        file = folder / CONFIG_FILE
        data = read_json(file)
        family = find_family(data, file)
        refuse_unknown(data, family, file)
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        heads, kv_heads, head_dim = _read_heads(data, family, file)
        latent = parse_latent(data, heads, file) if family.latent else None
        if latent is not None:
            kv_heads, head_dim = 1, latent.page_head_dim
        rope_dim = head_dim if latent is None else latent.rope_dim
        num_layers = positive_int(data, "num_hidden_layers", file)
        attention_bias = bool(data.get("attention_bias", False))
        return cls(
            family=family,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=positive_int(data, "hidden_size", file),
            intermediate_size=positive_int(data, "intermediate_size", file),
            vocab_size=positive_int(data, "vocab_size", file),
            context_length=positive_int(data, "max_position_embeddings", file),
            rms_norm_eps=float(data.get("rms_norm_eps", family.rms_norm_eps)),
            rope=parse_rope(data, file, rope_dim, family.rope_theta, family.partial_rotary),
            windows=_read_windows(data, family, num_layers, file),
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias and family.has_o_bias,
            qk_norm=family.qk_norm == "always" or bool(data.get("use_qk_norm", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            experts=parse_experts(data, family.experts, num_layers, file) if family.experts else None,
            latent=latent,
            dtype=_read_dtype(data, file),
            eos_token_ids=_read_token_ids(data, file) | _read_token_ids(generation, generation_file),
            revision=checkpoint_revision(folder),
            generation_defaults=_read_generation_defaults(generation),
            num_prediction_layers=max((int(data.get(key) or 0) for key in PREDICTION_KEYS & family.keys), default=0),
            scheme=parse_scheme(data, file),
        )


def _read_heads(data: Mapping[str, Any], family: Family, file: Path) -> tuple[int, int, int]:
    """Returns the numbers of query heads and KV heads, and the head dim."""
    heads = positive_int(data, "num_attention_heads", file)
    kv_heads = positive_int(data, "num_key_value_heads", file, family.num_kv_heads or heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{file}: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        )
    hidden_size = positive_int(data, "hidden_size", file)
    head_dim = positive_int(data, "head_dim", file, family.head_dim or hidden_size // heads)
    if head_dim % 2:
        raise CheckpointError(f"{file}: head_dim = {head_dim} must be even, because halves of a head are rotated")
    return heads, kv_heads, head_dim


def _read_windows(data: Mapping[str, Any], family: Family, num_layers: int, file: Path) -> tuple[int | None, ...]:
    if "sliding_window" not in family.keys:
        return (None,) * num_layers
    window = data.get("sliding_window", family.sliding_window)
    if "use_sliding_window" in family.keys and not data.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"{file}: sliding_window = {window!r}: a positive number of tokens or null is needed")
    if "layer_types" not in family.keys:
        return (window,) * num_layers
    layer_types = data.get("layer_types")
    if layer_types is None:
        first = data.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(_layer_window(kind, window, file) for kind in _checked_length(layer_types, num_layers, file))


def _checked_length(layer_types: Any, num_layers: int, file: Path) -> list[str]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(f"{file}: layer_types = {layer_types!r}: {num_layers} entries are needed, one per layer")
    return layer_types


def _layer_window(kind: str, window: int | None, file: Path) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise CheckpointError(f"{file}: layer_types holds {kind!r}; give full_attention or sliding_attention")
    if window is None:
        raise CheckpointError(
            f"{file}: layer_types holds 'sliding_attention', but sliding_window is off; give use_sliding_window and "
            "sliding_window"
        )
    return window


def _read_dtype(data: Mapping[str, Any], file: Path) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: dtype = {dtype!r} is not supported; give one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _read_token_ids(data: Mapping[str, Any], file: Path) -> frozenset[int]:
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"{file}: eos_token_id = {value!r}: a token id or a list of them is needed")
    return frozenset(ids)


def _read_generation_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the sampling defaults if the model is meant to be sampled; a penalty applies to greedy decoding too."""
    names = ("temperature", "top_k", "top_p", "min_p") if generation.get("do_sample") else ()
    wanted = (*names, "repetition_penalty")
    return {name: generation[name] for name in wanted if isinstance(generation.get(name), int | float)}
