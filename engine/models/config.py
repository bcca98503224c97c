"""Parses a checkpoint folder's description of its model, once while a worker starts.

`ModelConfig.from_folder` is the only reader of `config.json` and `generation_config.json`. Torch-free. It refuses
settings that would change results and are unknown here, because a model that answers slightly wrong is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.cache.kv_layout import DTYPE_BYTES
from engine.models.config_fields import positive_int, read_json
from engine.models.expert_config import ExpertConfig, parse_experts
from engine.models.families import PREDICTION_KEYS, Family, find_family, refuse_unknown
from engine.models.irope_config import IRopeConfig, parse_irope
from engine.models.latent_config import LatentConfig, parse_latent
from engine.models.rope_config import RopeConfig, parse_ropes
from engine.models.window_config import read_windows
from engine.weights.checkpoint import CONFIG_FILE, checkpoint_revision
from engine.weights.quantization_config import WeightScheme, parse_scheme
from penstock.errors import CheckpointError
from penstock.sizing.language_model import is_multi_modal, language_model_config


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
    local_rope: RopeConfig | None  # of layers with a window; None: `rope`
    windows: tuple[int | None, ...]  # for each layer, tokens that a query sees, itself included; None: all
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    attention_scale: float  # of scores; unused with latents
    attention_softcap: float | None
    final_softcap: float | None  # of logits
    mlp_bias: bool
    experts: ExpertConfig | None
    irope: IRopeConfig | None
    latent: LatentConfig | None  # with latents, num_kv_heads and head_dim describe the halves that pages hold
    dtype: str  # of config.json; float32 by default
    eos_token_ids: frozenset[int]
    revision: str  # changes whenever the configuration or the weights do
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    num_prediction_layers: int = 0  # stored after the last layer, to predict further tokens
    has_image_parts: bool = False  # the folder also holds what reads images, which is not served
    scheme: WeightScheme | None = None  # None: the checkpoint's weights are plain

    @property
    def page_window(self) -> int | None:
        """The number of tokens that a token reads, including itself, in the layer that reads most; None if it reads all
        before it.
        """
        widths = [window for window in self.windows if window is not None]
        return max(widths) if len(widths) == self.num_layers else None

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Returns the layers with a window, if others read all tokens before theirs. Chunked layers do not count."""
        layers = tuple(layer for layer, window in enumerate(self.windows) if window is not None)
        return layers if len(layers) < self.num_layers else ()

    @property
    def widest_window(self) -> int:
        """Returns how many tokens a token reads, including itself, in the windowed layer that reads most."""
        return max(window for window in self.windows if window is not None)

    @property
    def rope_dim(self) -> int:
        """The number of values of a head that the tables of the rotary embedding cover."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @classmethod
    def from_folder(cls, path: str | Path, *, has_weights: bool = True) -> ModelConfig:
        """Parses a Hugging Face checkpoint folder. Raises CheckpointError, which names the file, the value and the fix.

        Without weights the revision is empty, because nothing identifies it.
        """
        folder = Path(path)
        if folder.suffix == ".gguf":
            raise CheckpointError(
                f"{folder} is a GGUF file; run `penstock import-gguf {folder} FOLDER` and give that folder"
            )
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        parsed = cls.from_data(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
        return replace(
            parsed,
            eos_token_ids=parsed.eos_token_ids | _read_token_ids(generation, generation_file),
            revision=checkpoint_revision(folder) if has_weights else "",
            generation_defaults=_read_generation_defaults(generation),
        )

    @classmethod
    def from_data(cls, whole: Mapping[str, Any], file: Path) -> ModelConfig:
        """Parses the content of a `config.json`, which names no revision; `file` is its name in errors."""
        data = language_model_config(whole)
        family = find_family(data, file)
        refuse_unknown(data, family, file)
        attention = _read_attention(data, family, file)
        num_layers = positive_int(data, "num_hidden_layers", file)
        attention_bias = bool(data.get("attention_bias", family.attention_bias))
        experts = parse_experts(data, family.experts, num_layers, file) if family.experts else None
        return cls(
            family=family,
            num_layers=num_layers,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            hidden_size=positive_int(data, "hidden_size", file),
            intermediate_size=positive_int(data, family.dense_size_key, file),
            vocab_size=positive_int(data, "vocab_size", file),
            context_length=positive_int(data, "max_position_embeddings", file),
            rms_norm_eps=float(data.get("rms_norm_eps", family.rms_norm_eps)),
            rope=attention.rope,
            local_rope=attention.local_rope,
            windows=read_windows(data, family, num_layers, file),
            tie_embeddings=bool(data.get("tie_word_embeddings", family.tie_embeddings)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias and family.has_o_bias,
            qk_norm=family.qk_norm == "always"
            or (family.qk_norm == "configured" and bool(data.get("use_qk_norm", False))),
            attention_scale=_read_scale(data, family, attention.head_dim, file),
            attention_softcap=_read_softcap(data, "attn_logit_softcapping", family.attention_softcap, file),
            final_softcap=_read_softcap(data, "final_logit_softcapping", family.final_softcap, file),
            mlp_bias=bool(data.get("mlp_bias", False)),
            experts=experts,
            irope=parse_irope(data, num_layers, file) if family.interleaved else None,
            latent=attention.latent,
            dtype=_read_dtype(data, file),
            eos_token_ids=_read_token_ids(data, file),
            revision="",
            has_image_parts=is_multi_modal(whole),
            num_prediction_layers=max((int(data.get(key) or 0) for key in PREDICTION_KEYS & family.keys), default=0),
            scheme=None if experts is not None and experts.mxfp4 else parse_scheme(data, file),
        )


class _AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentConfig | None
    rope: RopeConfig
    local_rope: RopeConfig | None


def _read_attention(data: Mapping[str, Any], family: Family, file: Path) -> _AttentionShape:
    """Returns the heads as pages hold them, with their rotary embeddings."""
    heads, kv_heads, head_dim = _read_heads(data, family, file)
    latent = parse_latent(data, heads, file) if family.latent else None
    if latent is not None:
        kv_heads, head_dim = 1, latent.page_head_dim
    rope_dim = head_dim if latent is None else latent.rope_dim
    rope, local_rope = parse_ropes(
        data, file, rope_dim, family.rope_theta, family.local_rope_theta, family.partial_rotary
    )
    if family.needs_rope and not (data.get("rope_parameters") or data.get("rope_scaling")):
        raise CheckpointError(f"{file}: rope_scaling is missing; give the config.json of the published checkpoint")
    if family.interleaved:
        if rope.attention_factor != 1.0:
            raise CheckpointError(f"{file}: rope_type {rope.type!r} is not supported for {family.architecture}")
        rope = replace(rope, pairs_neighbours=True)
    return _AttentionShape(heads, kv_heads, head_dim, latent, rope, local_rope)


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


def _read_scale(data: Mapping[str, Any], family: Family, head_dim: int, file: Path) -> float:
    if family.query_scalar is None:
        return float(head_dim**-0.5)
    return float(positive_int(data, "query_pre_attn_scalar", file, family.query_scalar) ** -0.5)


def _read_softcap(data: Mapping[str, Any], key: str, default: float | None, file: Path) -> float | None:
    value = data.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{file}: {key} = {value!r}: a positive number or null is needed")
    return float(value)


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
