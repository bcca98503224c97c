"""Defines the model shapes that benchmarks use, and writes checkpoint folders of random weights in these shapes."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"


def _shape(
    *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
    }


# Llama of 135 million parameters, a usual size of small chat models.
LLAMA_135M = _shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=32000)
# The sizes of Llama-3.1-8B and Qwen3-0.6B, with the head tied to the embedding.
LLAMA_8B = _shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inner=14336, vocab=128256)
QWEN3_600M = _shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, inner=3072, vocab=151936)
TOY = _shape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, inner=48, vocab=300)
_TILE = 1 << 24  # values; sampling the 7.5e9 of the 8B shape would take minutes


def random_llama(shape: dict[str, int] = LLAMA_135M, context: int = 4096, family: str = "llama") -> Path:
    """Returns a folder with config.json, bf16 model.safetensors and tokenizer.json; `family` is llama or qwen3.

    It is written once and kept in the temporary folder.
    """
    key = "-".join(str(value) for value in shape.values())
    folder = Path(tempfile.gettempdir(), f"penstock-random-{family}-{key}-bfloat16-{context}")
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
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    sizes = _sizes(shape, has_qk_norm=family == "qwen3")
    write_tiled(folder / "model.safetensors", sizes, min(_TILE, max(map(math.prod, sizes.values()))))
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(shape["vocab_size"])}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "complete").touch()
    return folder


def write_tiled(file: Path, sizes: Mapping[str, tuple[int, ...]], tile: int = _TILE) -> None:
    """Writes bf16 noise that repeats one tile from varying offsets.

    This is as fast as the disk, and random enough for matrix products, whose speed depends on the values.
    """
    noise = torch.randn(tile, generator=torch.Generator().manual_seed(0))
    tiles: dict[int, memoryview] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for index, size in enumerate(sizes.values()):
            left, width = 2 * math.prod(size), size[-1] if len(size) > 1 else 0
            if width not in tiles:
                values = noise * width**-0.5 if width else torch.ones(tile)
                tiles[width] = values.bfloat16().view(torch.uint8).numpy().data
            begin = 2 * (index * 2049 % tile)
            while left:
                written = out.write(tiles[width][begin : begin + left])
                left, begin = left - written, 0


def _sizes(shape: dict[str, int], has_qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Returns tensor sizes by name, in the order in which they are sampled."""
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
