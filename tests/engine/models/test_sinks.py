"""Compares attention sinks with `transformers`, which gets the definition as a mask, for every way to compute."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.generate import generate
from engine.memory.estimates import make_layout
from engine.models.config import ModelConfig
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.types import SamplingParams
from tests.support.engine.checkpoints import make_checkpoint

SINKS, WINDOW, PAGE_SIZE = 5, 20, 8
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 61, 12
PROMPT = [(7 * i + 3) % 250 + 2 for i in range(NUM_PROMPT_TOKENS)]
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)


@functools.cache
def mask(num_tokens: int) -> torch.Tensor:
    """Returns what to add to the scores, [1, 1, query, key]: 0 where a token sees another one."""
    query_QK, key_QK = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    first_QK = (query_QK - WINDOW + 1).clamp(min=0) // PAGE_SIZE * PAGE_SIZE
    is_sink_QK = key_QK < -(-SINKS // PAGE_SIZE) * PAGE_SIZE
    is_seen_QK = (key_QK <= query_QK) & (is_sink_QK | (key_QK >= first_QK))
    return torch.where(is_seen_QK, 0.0, float("-inf"))[None, None]


@torch.inference_mode()
def oracle(folder: Path) -> tuple[list[int], list[int]]:
    """Returns greedy tokens with the mask, and without, recomputing the whole text for each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    answers = []
    for is_masked in (True, False):
        token_ids = list(PROMPT)
        for _ in range(NUM_NEW_TOKENS):
            options = {"attention_mask": mask(len(token_ids))} if is_masked else {}
            logits_V = model(torch.tensor([token_ids]), use_cache=False, **options).logits[0, -1]
            token_ids.append(int(logits_V.argmax()))
        answers.append(token_ids[NUM_PROMPT_TOKENS:])
    return answers[0], answers[1]


def load(folder: Path, **settings: Any) -> Engine:
    base = {"model": str(folder), "num_pages": 96, "page_size": PAGE_SIZE, "num_threads": 1, "dtype": "float32"}
    sinks = {"attention_sinks": SINKS, "attention_window": WINDOW}
    return Engine.load(EngineConfig.model_validate(base | sinks | settings))


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "auto"),
        ("llama", "torch"),
        ("llama", "triton"),
        ("qwen3", "auto"),
        ("qwen3_moe", "auto"),
        ("deepseek_v2", "auto"),
        ("deepseek_v2", "torch"),
    ],
)
def test_greedy_tokens_match_transformers(family: str, attention: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    wanted, unlimited = oracle(folder)
    assert wanted != unlimited
    engine = load(folder, attention=attention)
    for chunk_tokens in (None, 13):
        answer = generate(engine, PROMPT, GREEDY, chunk_tokens=chunk_tokens, use_prefix_cache=False)
        assert answer == wanted


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "fp8")])
def test_chunks_change_no_token(dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    engine = load(make_checkpoint("llama", tmp_path), dtype=dtype, kv_dtype=kv_dtype)
    answers = [
        generate(engine, PROMPT, GREEDY, chunk_tokens=chunk_tokens, use_prefix_cache=False)
        for chunk_tokens in (None, 1, 13)
    ]
    assert answers[1:] == [answers[0]] * 2


def test_pages_belong_to_a_model_of_their_own(tmp_path: Path) -> None:
    """Otherwise workers would exchange pages that were computed with other settings, or without sinks."""
    base = EngineConfig(model=str(make_checkpoint("llama", tmp_path)), attention_sinks=4, attention_window=64)
    others = ({"attention_sinks": 5}, {"attention_window": 65}, {"page_size": 32}, {"attention_sinks": 0})
    model = ModelConfig.from_folder(tmp_path)
    digests = [make_layout(base.model_copy(update=update), model).kv_digest() for update in ({}, *others)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("mistral", {}, "layers of .* see only a part of the text themselves"),
        ("gemma2", {}, "layers of .* see only a part"),
        ("llama4_text", {}, "layers of .* see only a part"),
        ("llama", {"tensor_parallel": 2}, r"engine\.tensor_parallel = 2 is not supported"),
        ("llama", {"host_memory_bytes": 1}, r"engine\.host_memory_bytes is not supported"),
        ("llama", {"attention": "flashinfer"}, r"engine\.attention = 'flashinfer' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(family: str, settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    overrides = {"sliding_window": 10} if family == "mistral" else {}
    folder = make_checkpoint(family, tmp_path, **overrides)
    config = EngineConfig.model_validate(
        {"model": str(folder), "attention_sinks": 4, "attention_window": 64} | settings
    )
    with pytest.raises(ConfigError, match=rf"engine\.attention_sinks = 4 .*{problem}.*; set it to 0"):
        make_layout(config, ModelConfig.from_folder(folder))
