"""Makes small random checkpoints of every supported family, as `transformers` writes them.

`make_checkpoint("llama", tmp_path)` takes well under a second: 2 layers of width 32, a byte-level tokenizer of 320
tokens. Weights depend only on the family and the overrides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from engine.weights.checkpoint import INDEX_FILE, list_weight_files, weights_digest
from penstock.config import LoadedWeightsConfig

FAMILIES = (
    "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama", "llama4_text", "mistral",
    "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
VOCAB_SIZE = 320
EOS_TOKEN_ID = 1
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "initializer_range": 0.3,  # wide, so that logits differ clearly and greedy choices are not ties
}
# Only some experts are chosen, and tests have so few tokens that some expert gets none.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "head_dim": None,
        "num_key_value_heads": None,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "head_dim": 8,  # transformers takes this as the rotated width
        "num_key_value_heads": None,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
    },
    "gemma2": {
        "sliding_window": 10,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "sliding_window": 10,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_mtp_layers": 0,
    },
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "num_local_experts": 5,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 16,
        "floor_scale": 8,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "olmo3": {
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}


def make_checkpoint(
    family: str,
    folder: Path,
    *,
    max_shard_size: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint with tokenizer.json into `folder`, created if missing, and returns it."""
    config = AutoConfig.for_model(family, **{**_BASE, **_OF_FAMILY.get(family, {}), **overrides})
    state = torch.random.get_rng_state()
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases start as ones and zeros, which would hide mistakes.
            if parameter.dim() == 1 or name.endswith("proj_bias"):
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    torch.random.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token for each byte: 0 begins, 1 ends, and bytes follow."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {symbol: 2 + index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def perturb_weights(folder: Path, into: Path, seed: int) -> LoadedWeightsConfig:
    """Writes the weights of a checkpoint slightly changed, as a trainer would: only safetensors files.

    Returns them as update number `seed`.
    """
    into.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    for file in list_weight_files(folder):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=random) * tensor.float().abs().mean() * 0.3
                tensor.copy_((tensor.float() + noise).to(tensor.dtype))
        save_file(tensors, into / file.name, {"format": "pt"})
    if (folder / INDEX_FILE).exists():
        (into / INDEX_FILE).write_bytes((folder / INDEX_FILE).read_bytes())
    return LoadedWeightsConfig(version=seed, path=str(into), digest=weights_digest(into))
