"""Checkpoint folders of random weights in the shapes that benchmarks are quoted for."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

# Llama, 135 million parameters, as small chat models have it.
LLAMA_135M = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 32000,
}

# The sizes of Llama-3.1-8B and Qwen3-0.6B; layers are Llama's, and the head is the embedding.
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN3_600M = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}


def random_llama(shape: dict[str, int] = LLAMA_135M, dtype: torch.dtype = torch.bfloat16, context: int = 4096) -> Path:
    """A folder with config.json, model.safetensors and tokenizer.json; made once and kept in the temporary folder."""
    key = "-".join(str(value) for value in shape.values())
    folder = Path(tempfile.gettempdir(), f"penstock-random-llama-{key}-{str(dtype).split('.')[1]}-{context}")
    if (folder / "complete").exists():
        return folder
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "torch_dtype": str(dtype).split(".")[1],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(shape, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(shape["vocab_size"])}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "complete").touch()
    return folder


def _weights(shape: dict[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q_size, kv_size = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(dtype)

    weights = {
        "model.embed_tokens.weight": random(shape["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            weights[f"{prefix}.self_attn.{name}.weight"] = random(size, hidden)
        weights[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, q_size)
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}.mlp.{name}.weight"] = random(inner, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = random(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=dtype)
    return weights
