"""Writes small GGUF files as llama.cpp's converter does; names and block formats come from the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoModelForCausalLM

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
}


def swap_rows(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of Llama's queries and keys as the converter does."""
    halves = values.view(num_heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    """Returns random blocks of Q4_K or Q6_K with values around 0; the package can read these formats but not write
    them."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, size), np.uint8)
    if kind is GGMLQuantizationType.Q4_K:
        blocks[:, 0:2], blocks[:, 2:4] = _half(4e-4), _half(3e-3)
    else:
        blocks[:, -2:] = _half(5e-5)
    return blocks.reshape(*shape[:-1], -1)


def _half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def write_gguf(checkpoint: Path, file: Path, kind: str = "F32", *, divisors: list[float] | None = None) -> Path:
    """Writes a checkpoint as a GGUF file whose matrices are stored as `kind`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config: Any = model.config
    name = config.model_type
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[name], config.num_hidden_layers)
    for number, (path, tensor) in enumerate(model.state_dict().items()):
        if path == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor
        if name == "llama" and ("q_proj" in path or "k_proj" in path):
            values = swap_rows(values, heads if "q_proj" in path else kv_heads)
        target = names.get_name(path, try_suffixes=(".weight", ".bias"))
        assert target is not None, path
        _add(writer, target, values.numpy(), kind, number)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str, seed: int) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
        return
    stored = GGMLQuantizationType[kind]
    if kind == "Q4_K" and not name.startswith("blk"):
        stored = GGMLQuantizationType.Q6_K  # as in files of Q4_K_M
    if stored in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        data = random_blocks(values.shape, stored, seed)
    else:
        data = gguf.quants.quantize(values.astype(np.float32), stored)
    writer.add_tensor(name, data, raw_dtype=stored)
