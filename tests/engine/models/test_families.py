"""Compares the engine with `transformers`: close logits and equal greedy tokens, for every family and way to
compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from engine.models.rope_config import RopeConfig
from engine.step.batch import build_batch
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams
from tests.support.engine.checkpoints import make_checkpoint

NUM_PROMPT_TOKENS = 45  # longer than every window below, and not a multiple of the page size
NUM_NEW_TOKENS = 24
PAGE_SIZE = 8
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "llama-sharded": ("llama", {"max_shard_size": "20KB"}),
    "llama-one-kv-head-each": ("llama", {"num_key_value_heads": 4}),
    "llama4": ("llama4_text", {}),
    "llama4-several-experts-rope-llama3": (
        "llama4_text",
        {
            "num_experts_per_tok": 2,
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "llama4-chunks-everywhere": ("llama4_text", {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 10}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window-upper-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-query-latents-groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
        },
    ),
    "deepseek_v2-yarn": (
        "deepseek_v2",
        {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}, "first_k_dense_replace": 3},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-halves-yarn-one-group": (
        "deepseek_v3",
        {
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "q_lora_rank": None,
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-no-biases-window-everywhere": (
        "gpt_oss",
        {"attention_bias": False, "layer_types": ["sliding_attention"] * 2, "swiglu_limit": 7.0},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window-one-expert": ("mixtral", {"sliding_window": 10, "num_experts_per_tok": 1}),
    "mixtral-all-experts-tied": ("mixtral", {"num_experts_per_tok": 5, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-plain-weights-window": (
        "qwen3_moe",
        {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 10, "attention_bias": True},
    ),
    "qwen3_moe-some-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "phi3": ("phi3", {}),
    "phi3-longrope-part": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
            "sliding_window": 10,
            "hidden_size": 64,
            "initializer_range": 0.2,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps-odd-layers": (
        "gemma2",
        {"num_hidden_layers": 3, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3-scaled-capped-biases": (
        "gemma3_text",
        {
            "final_logit_softcapping": 6.0,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-plain-heads-groups": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "qwen3-yarn-scaled-attention": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
}


@dataclass
class Case:
    """Holds a checkpoint, an engine over it, and the results of `transformers` for one prompt."""

    folder: Path
    engine: Engine
    prompt: list[int]
    tokens: list[int]  # greedy continuation of the prompt
    logits: torch.Tensor  # of each token
    others: list[list[int]] = field(default_factory=list)  # further prompts


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, overrides = CASES[request.param]
    folder = make_checkpoint(family, tmp_path_factory.mktemp(request.param), **overrides)
    engine = load(folder)
    generator = torch.Generator().manual_seed(7)
    prompt, *others = (
        torch.randint(2, 258, (n,), generator=generator).tolist() for n in (NUM_PROMPT_TOKENS, 9, 16, 31)
    )
    tokens, logits = oracle(folder, prompt)
    yield Case(folder, engine, prompt, tokens, logits, others)
    engine.pool.check_integrity()
    assert engine.pool.num_available == engine.pool.num_pages


def load(folder: Path, **settings: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(folder), num_pages=96, page_size=PAGE_SIZE, num_threads=1, **settings))


@torch.inference_mode()
def oracle(folder: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Returns greedy tokens and their logits, recomputing the whole text for each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    token_ids, logits = list(prompt), []
    for _ in range(NUM_NEW_TOKENS):
        logits.append(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1])
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :], torch.stack(logits)


def run(engine: Engine, prompt: list[int], forced: list[int], chunk_of: Callable[[int], int]) -> torch.Tensor:
    """Returns the logits of every given new token; `chunk_of(i)` is the number of tokens that step i may take."""
    pages = engine.pool.allocate(-(-(len(prompt) + len(forced)) // PAGE_SIZE))
    sequence = Sequence(RequestId("test"), list(prompt), len(prompt), GREEDY, b"", pages)
    logits, step = [], 0
    while len(logits) < len(forced):
        work = ScheduledSequence(sequence, min(sequence.num_uncomputed_tokens, chunk_of(step)))
        rows = engine.runner.forward(build_batch([work], PAGE_SIZE, torch.device("cpu")))
        if work.is_sampled:
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(forced[len(logits)])
            logits.append(rows[0])
        else:
            assert rows.shape[0] == 0
            sequence.num_computed_tokens += work.num_tokens
        step += 1
    engine.pool.release(pages)
    return torch.stack(logits)


@pytest.mark.parametrize("chunk_of", [lambda _: 1000, lambda step: (7, 1, 13)[step % 3]], ids=["whole", "odd-chunks"])
def test_logits_match_transformers(case: Case, chunk_of: Callable[[int], int]) -> None:
    logits = run(case.engine, case.prompt, case.tokens, chunk_of)
    torch.testing.assert_close(logits, case.logits, atol=1e-4, rtol=1e-4)


def test_greedy_tokens_match_transformers(case: Case) -> None:
    for chunk_tokens in (None, 1, 7, 16):
        tokens = generate(case.engine, case.prompt, GREEDY, chunk_tokens=chunk_tokens, use_prefix_cache=False)
        assert tokens == case.tokens, f"chunks of {chunk_tokens}"


def test_prefix_hits_change_no_token(case: Case) -> None:
    salt = b"prefix hits"
    assert generate(case.engine, case.prompt, GREEDY, salt, chunk_tokens=13) == case.tokens
    shared = case.prompt[:24]
    hashes = Sequence(RequestId("peek"), shared, len(shared), GREEDY, salt).hash_full_pages(PAGE_SIZE)
    assert case.engine.prefix_cache.peek(hashes) == 3
    assert generate(case.engine, case.prompt, GREEDY, salt, chunk_tokens=5) == case.tokens
    branch = shared + case.others[0]
    assert generate(case.engine, branch, GREEDY, salt) == generate(case.engine, branch, GREEDY, use_prefix_cache=False)


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone(case: Case) -> None:
    """Sequences join one after another, so that chunks come before, between and after decodes."""
    engine, prompts = case.engine, [case.prompt, *case.others]
    alone = [generate(engine, prompt, GREEDY, use_prefix_cache=False) for prompt in prompts]
    sequences = [
        Sequence(RequestId(str(i)), list(prompt), len(prompt), GREEDY, b"", engine.pool.allocate(10))
        for i, prompt in enumerate(prompts)
    ]
    for step in range(200):
        running = [s for i, s in enumerate(sequences) if step >= 3 * i and s.num_output_tokens < NUM_NEW_TOKENS]
        running = running[step % 2 :] + running[: step % 2]
        work = [ScheduledSequence(s, min(s.num_uncomputed_tokens, 6)) for s in running]
        for item, token in zip(work, engine.step(work).tokens, strict=True):
            assert (token is not None) == item.is_sampled
            item.sequence.num_computed_tokens += item.num_tokens
            if token is not None:
                item.sequence.token_ids.append(token.token_id)
    for sequence, tokens in zip(sequences, alone, strict=True):
        assert sequence.token_ids[sequence.num_prompt_tokens :] == tokens
        engine.pool.release(sequence.pages)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.008)])  # about 8 and 11 bits
def test_half_precision_stays_near_float32(case: Case, dtype: str, tolerance: float) -> None:
    engine = load(case.folder, dtype=dtype)
    assert engine.kv_pages.dtype == getattr(torch, dtype)
    logits = run(engine, case.prompt, case.tokens, lambda _: 16).float()
    assert error_of(logits, case) < tolerance


def error_of(logits: torch.Tensor, case: Case) -> float:
    """Returns the error of all tokens together, or with a choice of experts that of the median token: rounding may swap
    two equally likely experts, in `transformers` as here, and the token that they compute then differs."""
    experts = case.engine.model.experts
    if experts is None or experts.num_chosen == experts.num_experts:
        return float((logits - case.logits).norm() / case.logits.norm())
    return float(((logits - case.logits).norm(dim=1) / case.logits.norm(dim=1)).median())


def test_the_spelling_of_published_gemma_files_is_read(tmp_path: Path) -> None:
    """`transformers` writes the kind of every layer and a table of angles for each; older files have a pattern and two
    bases."""
    folder = make_checkpoint("gemma3_text", tmp_path, num_hidden_layers=3, layer_types=None)
    file = folder / "config.json"
    data = json.loads(file.read_text())
    old = {key: value for key, value in data.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 10000, "sliding_window_pattern": 2}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    file.write_text(json.dumps(old))
    model = ModelConfig.from_folder(folder)
    assert model.windows == (10, None, 10)
    assert (model.rope.type, model.rope.theta, model.rope.factor) == ("linear", 1e6, 8.0)
    assert model.local_rope == RopeConfig(theta=10000.0)
    file.write_text(json.dumps({**data, "layer_types": None, "sliding_window_pattern": 6}))
    assert ModelConfig.from_folder(folder).windows == (10, 10, 10)


def test_warm_up_frees_its_pages(case: Case) -> None:
    case.engine.warm_up()
    assert case.engine.pool.num_available == case.engine.pool.num_pages
    case.engine.pool.check_integrity()


def test_an_empty_step_gives_no_tokens(case: Case) -> None:
    assert case.engine.step([]).tokens == ()
