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

from engine.models.config import ModelConfig
from engine.models.shapes import tensor_shapes

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
# The sizes of TinyLlama-1.1B, with the head tied to the embedding.
LLAMA_1B = _shape(hidden=2048, layers=22, heads=32, kv_heads=4, head_dim=64, inner=5632, vocab=32000)
# The sizes of Llama-3.1-8B and Qwen3-0.6B, with the head tied to the embedding.
LLAMA_8B = _shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inner=14336, vocab=128256)
QWEN3_600M = _shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, inner=3072, vocab=151936)
# The sizes of Qwen3-30B-A3B: each token goes through 8 of a layer's 128 experts.
QWEN3_30B_A3B = {
    **_shape(hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, inner=6144, vocab=151936),
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}
TOY = _shape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, inner=48, vocab=300)
TOY_EXPERTS = {
    **TOY,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_TILE = 1 << 24  # values; sampling the 7.5e9 of the 8B shape would take minutes


def random_llama(shape: dict[str, int] = LLAMA_135M, context: int = 4096, family: str = "llama") -> Path:
    """Returns a folder with config.json, bf16 model.safetensors and tokenizer.json; `family` is llama or qwen3.

    It is written once and kept in the temporary folder.
    """
    key = "-".join(str(value) for value in shape.values())
    folder = Path(tempfile.gettempdir(), f"penstock-random-{family}-{key}-bfloat16-{context}")
    if (folder / "complete").exists():
        return folder
    _write_all_but_weights(folder, shape, context, family)
    sizes = _sizes(shape, has_qk_norm=family == "qwen3")
    write_tiled(folder / "model.safetensors", sizes, min(_TILE, max(map(math.prod, sizes.values()))))
    (folder / "complete").touch()
    return folder


def hollow_model(shape: Mapping[str, int], context: int, family: str, *, is_filled: bool = False) -> Path:
    """Returns a folder as `random_llama` does, whose weights are zeros in a sparse file, which takes no room on the
    disk, unless `is_filled`. `family` may also be qwen3_moe.
    """
    key = "-".join(str(value) for value in shape.values())
    folder = Path(tempfile.gettempdir(), f"penstock-hollow-{family}-{key}-{context}")
    _write_all_but_weights(folder, shape, context, family)
    sizes = tensor_shapes(ModelConfig.from_folder(folder, has_weights=False))
    if is_filled:
        write_tiled(folder / "model.safetensors", sizes, max(map(math.prod, sizes.values())))
        return folder
    header, end = _header(sizes)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + end)
    return folder


def _write_all_but_weights(folder: Path, shape: Mapping[str, int], context: int, family: str) -> None:
    folder.mkdir(exist_ok=True)
    name = "".join(part.capitalize() for part in family.split("_"))
    config = {
        "architectures": [f"{name}ForCausalLM"],
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
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(shape["vocab_size"])}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _header(sizes: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """Returns the header of a safetensors file of bf16 tensors, and the bytes of their values."""
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * math.prod(size)
        tensors[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end


def write_tiled(file: Path, sizes: Mapping[str, tuple[int, ...]], tile: int = _TILE) -> None:
    """Writes bf16 noise that repeats one tile from varying offsets.

    This is as fast as the disk, and random enough for matrix products, whose speed depends on the values.
    """
    noise = torch.randn(tile, generator=torch.Generator().manual_seed(0))
    tiles: dict[int, memoryview] = {}
    header, _ = _header(sizes)
    with file.open("wb") as out:
        out.write(header)
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
