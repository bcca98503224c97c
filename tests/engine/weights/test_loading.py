"""Tests that folders that cannot be served are refused with the file, the value and the fix, and good ones load
unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from engine.weights.checkpoint import checkpoint_revision
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.types import SamplingParams
from tests.support.engine.checkpoints import make_checkpoint

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """Returns a copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def load(folder: Path, **settings: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(folder), **{"num_pages": 8, **settings}))


def edit_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"config.json: architectures = \['GPT2LMHeadModel'\].*not supported.*Qwen3",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification.*give a checkpoint of",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu'"),
        (
            {"attention_multiplier": 0.5},
            "attention_multiplier = 0.5 is unknown for LlamaForCausalLM.*remove it",
        ),
        ({"num_local_experts": 8}, "num_local_experts = 8 is unknown"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq.*without it"),
        ({"sliding_window": 128}, "sliding_window = 128 is unknown for LlamaForCausalLM"),
        ({"rope_interleaved": True}, "rope_interleaved = True is unknown"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; only whole heads"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type = 'dynamic' is not supported.*yarn",
        ),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rope_type = 'ntk' is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}},
            r"short_factor = \[1.0, 2.0\]: a list of 8 positive numbers",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor = None: a positive number"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "twist": 1}},
            "rope_parameters.twist = 1 is unknown",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat table for all layers"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': a positive whole number"),
        ({"vocab_size": ...}, "vocab_size = None: a positive whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        ({"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn' is not supported; give one of bfloat16"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>': a token id"),
        (
            {"intermediate_size": 48},
            r"down_proj.weight has shape \[32, 64\], config.json asks for \[32, 48\]",
        ),
        ({"num_hidden_layers": 3}, r"model.layers.2.input_layernorm.weight \(9 in all\) is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.* is not part of the model"),
        ({"attention_bias": True}, r"bias \(8 in all\) is missing"),
    ],
)
def test_a_config_that_would_change_results_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(edit_config(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types = .*2 entries are needed, one per layer"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types holds 'linear_attention'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "'sliding_attention', but sliding_window is off",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window = 0: a positive number of tokens",
        ),
    ],
)
def test_an_inconsistent_window_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(edit_config(make_checkpoint("qwen2", tmp_path), **changes))


def test_keys_without_effect_are_accepted(folder: Path) -> None:
    load(edit_config(folder, pretraining_tp=4, _name_or_path="here", quantization_config=None, is_llama_config=True))


def test_old_spellings_mean_the_same(tmp_path: Path) -> None:
    new = make_checkpoint("qwen2", tmp_path / "new", rope_parameters={**YARN, "rope_type": "yarn", "rope_theta": 700.0})
    old = Path(shutil.copytree(new, tmp_path / "old"))
    edit_config(old, rope_parameters=..., rope_theta=700.0, rope_scaling=YARN, dtype=..., torch_dtype="float32")
    assert ModelConfig.from_folder(old).rope == ModelConfig.from_folder(new).rope
    assert ModelConfig.from_folder(old).rope.theta == 700.0
    assert ModelConfig.from_folder(old).dtype == "float32"


def test_missing_and_broken_files_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut short.*fetch the file again"):
        load(folder)
    weights.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a safetensors file"):
        load(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read.*give valid JSON"):
        load(folder)
    with pytest.raises(CheckpointError, match=r"config.json is missing; give a Hugging Face checkpoint folder"):
        load(folder / "nowhere")


def test_a_missing_shard_is_reported_by_file(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(
        CheckpointError, match=f"{shards[1].name} is missing, though model.safetensors.index.json names it"
    ):
        load(folder)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = "../../secret.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="names of files in the same folder are needed"):
        load(folder)


def test_tensors_must_be_those_of_the_model(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"model.extra.weight of shape \[2\] is not part of the model"):
        load(folder)
    edit_weights(folder, lambda tensors: tensors.pop("model.extra.weight"))
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight is stored as I8; give unquantized weights"):
        load(folder)


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.full_like(tensors["model.embed_tokens.weight"], torch.nan)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    before = generate(load(folder), [5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    edit_weights(folder, add)
    after = generate(load(folder), [5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert after == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_context": 1000}, r"engine.max_context = 1000 is more than the 512 tokens"),
        (
            {"num_pages": None, "kv_memory_bytes": 5000},
            r"engine.kv_memory_bytes = 5000 holds 0 pages of 8192 bytes",
        ),
        ({"device": "abacus"}, r"engine.device = 'abacus' is not a device"),
        ({"device": "meta"}, r"engine.device = 'meta' is not available here"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **settings)


def test_pages_fill_the_configured_memory(folder: Path) -> None:
    engine = load(folder, num_pages=None, kv_memory_bytes=100_000, page_size=4)
    assert engine.layout.page_bytes == engine.kv_pages[0].numel() * 4 == 2048
    assert engine.pool.num_pages == engine.kv_pages.shape[0] == 48
    assert tuple(engine.kv_pages.shape) == engine.layout.shape(48)


def test_progress_ends_at_one(folder: Path) -> None:
    heard: list[float] = []
    Engine.load(EngineConfig(model=str(folder), num_pages=4), heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 1.0
    assert len(heard) > 10


def test_revision_and_layout_follow_the_weights(folder: Path, tmp_path: Path) -> None:
    before = load(folder)
    twin = Path(shutil.copytree(folder, tmp_path / "twin"))
    assert load(twin).layout.digest() == before.layout.digest()
    edit_weights(twin, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    after = load(twin)
    assert after.model.revision != before.model.revision
    assert after.layout.digest() != before.layout.digest()
    assert load(folder, page_size=4).layout.digest() != before.layout.digest()
    assert load(folder, dtype="bfloat16").layout.digest() != before.layout.digest()


def test_the_generation_config_gives_end_tokens_and_defaults(folder: Path) -> None:
    settings = {
        "eos_token_id": [1, 9],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    file = folder / "generation_config.json"
    file.write_text(json.dumps(settings))
    model = ModelConfig.from_folder(folder)
    assert model.eos_token_ids == {1, 9}
    assert model.generation_defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    file.write_text(json.dumps({**settings, "do_sample": False}))
    assert ModelConfig.from_folder(folder).generation_defaults == {"repetition_penalty": 1.1}
    file.unlink()
    assert ModelConfig.from_folder(folder).eos_token_ids == {1}


def many_tensors(folder: Path, changed: str | None = None, names: Sequence[str] = ()) -> str:
    """Returns the revision of a checkpoint with tensors of 8 KiB, one of which may be changed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors = {name: torch.full((2048,), 2.0 if name == changed else 1.0) for name in names}
    save_file(tensors, folder / "model.safetensors")
    return checkpoint_revision(folder)


def test_a_fine_tune_of_any_tensor_is_another_revision(tmp_path: Path) -> None:
    names = [f"layers.{layer}.q_proj.weight" for layer in range(64)]
    revisions = {many_tensors(tmp_path, changed, names) for changed in (None, *names)}
    assert len(revisions) == 1 + len(names)
    assert many_tensors(tmp_path / "copy", None, names) == many_tensors(tmp_path, None, names)


def test_a_revision_of_very_many_tensors_samples_experts_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.weights.checkpoint._MAX_TENSOR_SAMPLES", 8)
    names = [f"layers.{layer}.experts.{expert}.weight" for layer in range(4) for expert in range(32)]
    names += [f"layers.{layer}.q_proj.weight" for layer in range(4)]
    assert len({many_tensors(tmp_path, changed, names) for changed in (None, *names[-4:])}) == 5
