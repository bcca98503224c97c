"""Compares adapters with PEFT over `transformers`: close logits and equal greedy tokens for every dense family."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.generate import generate, use_adapter
from engine.step.batch import build_batch
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.kv.adapter_files import AdapterRef, read_adapter_ref
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import make_checkpoint

PROMPT = [(7 * i) % 300 + 5 for i in range(45)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": DENSE}
PARTLY_TURNED = {"partial_rotary_factor": 0.75}
# Each row: the family, its config, and the adapter's settings.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, LORA),
    "llama-biases-rslora": ("llama", {"attention_bias": True, "mlp_bias": True}, LORA | {"use_rslora": True, "r": 3}),
    "llama-q-and-v": ("llama", {}, LORA | {"target_modules": ["q_proj", "v_proj"]}),
    "llama-one-layer": ("llama", {}, LORA | {"layers_to_transform": [1]}),
    "mistral-window": ("mistral", {"sliding_window": 10}, LORA),
    "qwen2": ("qwen2", {}, LORA),
    "qwen3": ("qwen3", {}, LORA),
    "gemma2": ("gemma2", {}, LORA),
    "gemma3": ("gemma3_text", {}, LORA),
    "olmo2": ("olmo2", {}, LORA),
    "phi3": ("phi3", {}, LORA | {"target_modules": FUSED}),
    "phi3-part": ("phi3", PARTLY_TURNED, LORA | {"target_modules": FUSED}),
    "mixtral-attention": ("mixtral", {}, LORA | {"target_modules": ATTENTION}),
    "glm4_moe-attention": ("glm4_moe", {}, LORA | {"target_modules": ATTENTION}),
}


def make_with_peft(model: Path, folder: Path, settings: dict[str, Any], seed: int = 0) -> AdapterRef:
    """Writes an adapter whose B is random as well as A; PEFT initializes B with zeros, which change nothing."""
    from peft import LoraConfig, get_peft_model  # takes 1.5 s, in each process that collects tests

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**settings, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model has no model card
        adapted.save_pretrained(folder)
    return read_adapter_ref(folder.name, str(folder))


def logits_of(engine: Engine, ref: AdapterRef | None, token_ids: list[int]) -> torch.Tensor:
    sequence = Sequence(RequestId("logits"), list(token_ids), len(token_ids), GREEDY, b"")
    if ref is not None:
        use_adapter(engine, sequence, ref)
    sequence.pages = engine.pool.allocate(-(-len(token_ids) // engine.layout.page_size))
    try:
        batch = build_batch([ScheduledSequence(sequence, len(token_ids))], engine.layout.page_size, torch.device("cpu"))
        return engine.runner.forward(batch)[0]
    finally:
        engine.pool.release(sequence.pages)
        if ref is not None and engine.adapters is not None:
            engine.adapters.slots.release(ref.revision)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_equal_those_of_peft(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    family, overrides, settings = CASES[case]
    folder = make_checkpoint(family, tmp_path / "model", **overrides)
    ref = make_with_peft(folder, tmp_path / "adapter", settings)
    config = {"model": str(folder), "dtype": "float32", "page_size": 8, "num_pages": 64, "max_adapters": 2}
    engine = Engine.load(EngineConfig.model_validate(config | {"max_adapter_rank": 5}))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain_V = base(torch.tensor([PROMPT])).logits[0, -1]
        adapted = PeftModel.from_pretrained(base, ref.path)
        wanted_V = adapted(torch.tensor([PROMPT])).logits[0, -1]
        tokens = adapted.generate(
            input_ids=torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0].tolist()[len(PROMPT) :]
    assert (wanted_V - plain_V).abs().max() > 0.1, "the adapter changes nothing"
    torch.testing.assert_close(logits_of(engine, ref, PROMPT), wanted_V, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(logits_of(engine, None, PROMPT), plain_V, rtol=2e-4, atol=2e-4)
    assert generate(engine, PROMPT, GREEDY, b"adapted", adapter=ref) == tokens
    assert generate(engine, PROMPT, GREEDY, b"adapted in chunks", chunk_tokens=7, adapter=ref) == tokens
    engine.close()
