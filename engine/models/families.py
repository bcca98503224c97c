"""Lists the decoder families that can be served: how each differs from Llama, and which keys of `config.json` it reads.

`engine.models.config` uses it once while a model loads. Torch-free. Unknown keys are refused, because a model that
answers slightly wrong is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.models.expert_config import (
    DEEPSEEK_KEYS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    EXPERT_KEYS,
    GLM4_MOE,
    GPT_OSS,
    LLAMA4,
    LLAMA4_KEYS,
    MIXTRAL,
    QWEN3_MOE,
    SPARSITY_KEYS,
    STACKED_KEYS,
    ExpertFamily,
)
from engine.models.irope_config import IROPE_KEYS
from engine.models.latent_config import LATENT_KEYS
from penstock.errors import CheckpointError
from penstock.sizing.language_model import LANGUAGE_MODELS


class NormNames(NamedTuple):
    """The names of a layer's norms below `model.layers.N.`: norms of what the attention and the feed-forward block
    read, and of what they add to the residual. None: not normalised.
    """

    attention_input: str | None
    mlp_input: str | None
    attention_output: str | None = None
    mlp_output: str | None = None


_GEMMA_NORMS = NormNames(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
_INPUT_NORMS = NormNames("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Family:
    """The properties that distinguish a decoder family from Llama. Defaults are those of its published configs."""

    architecture: str
    model_type: str
    qkv_bias: bool = False  # always present, without a key in config.json
    attention_bias: bool = False  # the default of attention_bias in config.json
    sinks: bool = False  # each query head has a score that takes its share of the weights and has no value
    needs_rope: bool = False  # config.json must describe the rotary embedding
    has_o_bias: bool = True  # attention_bias adds one to the output projection too
    qk_norm: Literal["never", "always", "configured"] = "never"  # configured: by use_qk_norm
    wide_qk_norm: bool = False  # the norms of queries and keys span all heads instead of one
    fused_products: bool = False  # query, key and value are stored as one tensor, gate and up as another
    norms: NormNames = _INPUT_NORMS
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None  # of layers with a window; None: all layers have one base
    window_pattern: int | None = None  # without layer_types: every n-th layer has no window
    gelu: bool = False  # instead of silu
    norm_offset: bool = False  # norms store their difference from 1
    scaled_embedding: bool = False  # the embedding is multiplied by the root of the hidden size
    tie_embeddings: bool = False
    query_scalar: int | None = None  # query_pre_attn_scalar; None: scores are scaled by the head dim
    attention_softcap: float | None = None
    final_softcap: float | None = None
    partial_rotary: float | None = None  # the rotated part of a head; None: whole heads, without a key in config.json
    rms_norm_eps: float = 1e-6
    experts: ExpertFamily | None = None
    latent: bool = False
    interleaved: bool = False  # the attention of Llama 4: see `engine.models.irope_config`
    dense_block: str = "mlp"  # below `model.layers.N.`
    dense_size_key: str = "intermediate_size"  # in config.json: the width of dense blocks
    keys: frozenset[str] = frozenset()  # config keys that only this family reads


PREDICTION_KEYS = frozenset({"num_nextn_predict_layers", "num_mtp_layers"})
_GEMMA_KEYS = frozenset({
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types", "attention_bias",
    "rope_local_base_freq",
})  # fmt: skip
_GELU_NAMES = ("gelu_pytorch_tanh",)
_SILU_NAMES = ("silu", "swish")
_WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
FAMILIES = (
    Family("LlamaForCausalLM", "llama", keys=frozenset({"attention_bias", "mlp_bias"})),
    Family(  # text only
        "Llama4ForCausalLM",
        "llama4_text",
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        experts=LLAMA4,
        interleaved=True,
        dense_block="feed_forward",
        dense_size_key="intermediate_size_mlp",
        keys=EXPERT_KEYS | LLAMA4_KEYS | IROPE_KEYS | {"attention_bias", "intermediate_size_mlp"},
    ),
    Family("MistralForCausalLM", "mistral", num_kv_heads=8, sliding_window=4096, keys=frozenset({"sliding_window"})),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, num_kv_heads=32, sliding_window=4096, keys=_WINDOW_KEYS),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        qk_norm="always",
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        keys=_WINDOW_KEYS | {"attention_bias"},
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        num_kv_heads=8,
        rope_theta=1e6,
        experts=MIXTRAL,
        keys=EXPERT_KEYS | {"sliding_window"},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        qk_norm="always",
        num_kv_heads=4,
        sliding_window=4096,
        experts=QWEN3_MOE,
        # Published files contain max_window_layers, but nothing reads it: a window applies to all layers.
        keys=EXPERT_KEYS | SPARSITY_KEYS | (_WINDOW_KEYS - {"layer_types"}) | {"attention_bias"},
    ),
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        experts=DEEPSEEK_V2,
        latent=True,
        keys=EXPERT_KEYS | DEEPSEEK_KEYS | LATENT_KEYS,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        experts=DEEPSEEK_V3,
        latent=True,
        # Layers that predict further tokens only draft: see `engine.models.heads.mtp`.
        keys=EXPERT_KEYS | DEEPSEEK_KEYS | LATENT_KEYS | PREDICTION_KEYS | {"norm_topk_prob", "rope_interleave"},
    ),
    Family(  # Phi-3, Phi-3.5 and Phi-4, text only
        "Phi3ForCausalLM",
        "phi3",
        fused_products=True,
        partial_rotary=1.0,
        rms_norm_eps=1e-5,
        keys=frozenset({"sliding_window"}),
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        qk_norm="always",
        wide_qk_norm=True,
        norms=NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
        rms_norm_eps=1e-5,
        keys=frozenset({"attention_bias"}),
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        qk_norm="always",
        wide_qk_norm=True,
        norms=NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
        sliding_window=4096,
        window_pattern=4,
        rope_theta=500000.0,
        local_rope_theta=500000.0,
        rms_norm_eps=1e-5,
        keys=frozenset({"attention_bias", "sliding_window", "layer_types"}),
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        norms=_GEMMA_NORMS,
        num_kv_heads=4,
        head_dim=256,
        sliding_window=4096,
        window_pattern=2,
        gelu=True,
        norm_offset=True,
        scaled_embedding=True,
        tie_embeddings=True,
        query_scalar=256,
        attention_softcap=50.0,
        final_softcap=30.0,
        keys=_GEMMA_KEYS - {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
    ),
    Family(  # text only
        "Gemma3ForCausalLM",
        "gemma3_text",
        qk_norm="always",
        norms=_GEMMA_NORMS,
        num_kv_heads=4,
        head_dim=256,
        sliding_window=4096,
        window_pattern=6,
        rope_theta=1e6,
        local_rope_theta=10000.0,
        gelu=True,
        norm_offset=True,
        scaled_embedding=True,
        tie_embeddings=True,
        query_scalar=256,
        keys=_GEMMA_KEYS - {"attn_logit_softcapping"},  # published as null; `transformers` ignores other values
    ),
    Family(  # GLM-4.5, 4.5-Air and 4.6
        "Glm4MoeForCausalLM",
        "glm4_moe",
        has_o_bias=False,
        qk_norm="configured",
        num_kv_heads=8,
        partial_rotary=0.5,
        rms_norm_eps=1e-5,
        experts=GLM4_MOE,
        keys=EXPERT_KEYS | DEEPSEEK_KEYS | PREDICTION_KEYS | {"norm_topk_prob", "use_qk_norm", "attention_bias"},
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        attention_bias=True,
        sinks=True,
        needs_rope=True,
        num_kv_heads=8,
        head_dim=64,
        sliding_window=128,
        window_pattern=2,
        rope_theta=150000.0,
        rms_norm_eps=1e-5,
        experts=GPT_OSS,
        keys=EXPERT_KEYS
        | STACKED_KEYS
        | {"attention_bias", "sliding_window", "layer_types", "initial_context_length"},  # the last has no effect
    ),
)

# fmt: off
_READ_KEYS = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "hidden_act",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "eos_token_id", "torch_dtype", "dtype", "quantization_config", "compression_config",
})
_KEYS_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "embd_pdrop", "finetuning_task", "full_attn_mod", "hidden_dropout", "id2label",
    "initializer_range", "interpolate_factor", "is_decoder", "is_llama_config", "label2id", "max_length",
    "max_new_tokens", "mlp_dropout", "name", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "rope_interleaved",
    "task_specific_params", "tokenizer_class", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache",
})
# fmt: on
_NO_EFFECT_ONLY_AS = {
    "rope_interleaved": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}  # any other value changes results


def find_family(data: Mapping[str, Any], file: Path) -> Family:
    """Returns the family that the checkpoint names. Raises CheckpointError for any other."""
    architectures = data.get("architectures")
    for family in FAMILIES:
        if architectures == [family.architecture] or (
            not architectures and data.get("model_type") == family.model_type
        ):
            return family
    known = ", ".join([*(family.architecture for family in FAMILIES), *LANGUAGE_MODELS])
    raise CheckpointError(
        f"{file}: architectures = {architectures!r}, model_type = {data.get('model_type')!r} is not supported; "
        f"give a checkpoint of one of {known}"
    )


def refuse_unknown(data: Mapping[str, Any], family: Family, file: Path) -> None:
    """Raises CheckpointError for keys that nothing here reads and that could change results."""
    known = _GELU_NAMES if family.gelu else _SILU_NAMES
    for key in ("hidden_activation", "hidden_act") if family.gelu else ("hidden_act",):
        if data.get(key, known[0]) not in (*known, *((None,) if family.gelu else ())):
            raise CheckpointError(f"{file}: {key} = {data[key]!r} is not supported; only {known[0]!r} is")
    for key, value in data.items():
        if key in _READ_KEYS or key in family.keys or value in (None, False) or value in ({}, [], ""):
            continue
        if key in _KEYS_WITHOUT_EFFECT and _NO_EFFECT_ONLY_AS.get(key, value) == value:
            continue
        raise CheckpointError(
            f"{file}: {key} = {value!r} is unknown for {family.architecture} and could change results; "
            "remove it if it does not, or give a checkpoint without it"
        )
