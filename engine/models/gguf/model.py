"""Translates a GGUF file's metadata to `config.json`, and the names of its tensors. Pure, torch-free.

Refuses whatever it does not translate: a model that answers slightly wrong is worse than none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.models.gguf.header import GgufHeader, Value
from penstock.errors import CheckpointError

FREQUENCIES = "rope_freqs.weight"  # the divisors of Llama 3.1's rotary frequencies
_TOKENS, _HEAD = "token_embd.weight", "output.weight"
_WHOLE = {_TOKENS: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", _HEAD: "lm_head.weight"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
# Factors that Meta has published: of Llama 3.1 and 3.3, and of Llama 3.2.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    architecture: str  # of config.json
    model_type: str
    swaps_rows: bool = False  # rows of queries and keys are stored in pairs that rotate together


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", swaps_rows=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
}
# Metadata that changes what a model computes, and has no counterpart here.
_REFUSED = ("expert_count", "attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias")


def find_gguf_family(header: GgufHeader) -> GgufFamily:
    """Raises CheckpointError for an architecture that is not imported."""
    name = header.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise CheckpointError(
            f"{header.file}: general.architecture = {name!r} is not imported; give a file of {', '.join(FAMILIES)}, or "
            "the Hugging Face folder of the model"
        )
    return FAMILIES[str(name)]


def make_config(header: GgufHeader, frequencies: Sequence[float] | None, dtype: str) -> dict[str, Any]:
    """Returns `config.json`. `frequencies` are the values of `FREQUENCIES`, if the file has it.

    Raises CheckpointError.
    """
    family = find_gguf_family(header)
    read = _Metadata(header)
    _refuse_unsupported(read)
    heads, hidden_size = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = _read_head_dim(read, hidden_size // heads)
    num_layers = _count_layers(read)
    theta = read.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        "vocab_size": _vocab_size(header),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", None),
        "rope_theta": theta,
        "tie_word_embeddings": _HEAD not in header.tensors,
        "torch_dtype": dtype,
    }
    if family.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    for name, key in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        token = header.metadata.get(f"tokenizer.ggml.{key}")
        if token is not None:
            config[f"{name}_token_id"] = token
    scaling = _rope_scaling(read, header, frequencies, theta, head_dim)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _refuse_unsupported(read: _Metadata) -> None:
    for key in _REFUSED:
        if read.value(key):
            raise CheckpointError(
                f"{read.file}: {read.name(key)} = {read.value(key)!r} is not imported; give the Hugging Face folder "
                "of the model"
            )


def _read_head_dim(read: _Metadata, default: int) -> int:
    head_dim = read.integer("attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{read.file}: {read.name(key)} must be {head_dim}, the width of a head")
    return head_dim


def _count_layers(read: _Metadata) -> int:
    """Returns the number of layers. Bounds it by the file's tensors, since importing takes time and memory by layer."""
    num_layers = read.integer("block_count")
    if num_layers > read.num_tensors:  # each layer has several
        raise CheckpointError(
            f"{read.file}: {read.name('block_count')} = {num_layers}, and the file has {read.num_tensors} tensors "
            "in all; fetch the file again"
        )
    return num_layers


def translate_name(name: str) -> str | None:
    """Returns a tensor's name in a Hugging Face checkpoint; None if it has none."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return _WHOLE.get(name)
    layer, part, suffix = found.groups()
    return f"model.layers.{layer}.{_PARTS[part]}.{suffix}" if part in _PARTS else None


class _Metadata:
    """The metadata of the file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.file = header.file
        self.num_tensors = len(header.tensors)

    def name(self, key: str) -> str:
        return f"{self._header.metadata['general.architecture']}.{key}"

    def value(self, key: str) -> Value | None:
        return self._header.metadata.get(self.name(key))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive whole number, the same for all layers, is needed")
        return value

    def number(self, key: str, default: float | None) -> float:
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a positive number is needed")
        return float(value)

    def _wrong(self, key: str, value: object, needed: str) -> CheckpointError:
        return CheckpointError(f"{self._header.file}: {self.name(key)} = {value!r}: {needed}")


def _vocab_size(header: GgufHeader) -> int:
    tokens = header.tensors.get(_TOKENS)
    if tokens is None or len(tokens.shape) != 2:
        raise CheckpointError(f"{header.file}: tensor {_TOKENS} is missing; give a file that holds the whole model")
    return tokens.shape[0]


def _rope_scaling(
    read: _Metadata, header: GgufHeader, frequencies: Sequence[float] | None, theta: float, head_dim: int
) -> Mapping[str, Any] | None:
    kind = read.value("rope.scaling.type") or "none"
    if kind == "linear" and frequencies is not None:
        raise CheckpointError(
            f"{header.file}: {read.name('rope.scaling.type')} = 'linear' beside {FREQUENCIES} is not imported; give "
            "the Hugging Face folder of the model"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": read.number("rope.scaling.factor", None)}
    if kind != "none":
        raise CheckpointError(f"{header.file}: {read.name('rope.scaling.type')} = {kind!r} is not imported; give none")
    if frequencies is None:
        return None
    for factor in _LLAMA3_FACTORS:
        wanted = llama3_divisors(factor, theta, head_dim)
        if len(wanted) == len(frequencies) and all(
            math.isclose(expected, actual, rel_tol=1e-3) for expected, actual in zip(wanted, frequencies, strict=True)
        ):
            return _LLAMA3 | {"factor": factor}
    raise CheckpointError(
        f"{header.file}: {FREQUENCIES} is not that of Llama 3.1, 3.2 or 3.3; give the Hugging Face folder of the model"
    )


def llama3_divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """Returns Llama 3.1's divisor of each frequency."""
    original, low, high = (float(_LLAMA3[key]) for key in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"
    ))  # fmt: skip
    divisors: list[float] = []
    for pair in range(head_dim // 2):
        turns = original * theta ** (-2 * pair / head_dim) / (2 * math.pi)  # within the original context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors
