"""Checkpoint folders of random weights in the shapes that benchmarks are quoted for."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Mapping
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

# The sizes of Llama-3.1-8B and Qwen3-0.6B; the head is the embedding.
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


TOY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 300,
}
_TILED_FROM = 1 << 28  # values; drawing 7.5e9 would take minutes
_TILE = 1 << 24


def random_llama(
    shape: dict[str, int] = LLAMA_135M,
    dtype: torch.dtype = torch.bfloat16,
    context: int = 4096,
    family: str = "llama",
) -> Path:
    """A folder with config.json, model.safetensors and tokenizer.json; made once and kept in the temporary folder.
    `family` is llama or qwen3."""
    key = "-".join(str(value) for value in shape.values())
    folder = Path(tempfile.gettempdir(), f"penstock-random-{family}-{key}-{str(dtype).split('.')[1]}-{context}")
    if (folder / "complete").exists():
        return folder
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
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
    sizes = _sizes(shape, has_qk_norm=family == "qwen3")
    if sum(math.prod(size) for size in sizes.values()) < _TILED_FROM:
        save_file(_weights(sizes, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        write_tiled(folder / "model.safetensors", sizes)
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(shape["vocab_size"])}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "complete").touch()
    return folder


def write_tiled(file: Path, sizes: Mapping[str, tuple[int, ...]], tile: int = _TILE) -> None:
    """bf16 noise, the same over and over from another place on: as fast as it is written, and as random to a matrix
    product, whose speed depends on the values."""
    noise = torch.randn(tile, generator=torch.Generator().manual_seed(0))
    tiles: dict[int, memoryview] = {}
    header, end = {}, 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for place, size in enumerate(sizes.values()):
            left, width = 2 * math.prod(size), size[-1] if len(size) > 1 else 0
            if width not in tiles:
                values = noise * width**-0.5 if width else torch.ones(tile)
                tiles[width] = values.bfloat16().view(torch.uint8).numpy().data
            begin = place * 4098 % tile
            while left:
                written = out.write(tiles[width][begin : begin + left])
                left, begin = left - written, 0


def _sizes(shape: dict[str, int], has_qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """By name, in the order in which they are drawn."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q_size, kv_size = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            sizes[f"{prefix}.self_attn.{name}.weight"] = (size, hidden)
        sizes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q_size)
        for name in ("gate_proj", "up_proj"):
            sizes[f"{prefix}.mlp.{name}.weight"] = (inner, hidden)
        sizes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{prefix}.{name}.weight"] = (hidden,)
        for name in ("q_norm", "k_norm") if has_qk_norm else ():
            sizes[f"{prefix}.self_attn.{name}.weight"] = (shape["head_dim"],)
    return sizes


def _weights(sizes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def values(size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=dtype)
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(dtype)

    return {name: values(size) for name, size in sizes.items()}
