"""Tests that the language model of a multi-modal folder is served like `transformers` computes its texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedModel,
)

from engine.adapters.checkpoint import read_adapter
from engine.adapters.products import adapted_products
from engine.engine import Engine
from engine.generate import generate
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from engine.weights.broadcast.receive import check_manifest
from engine.weights.checkpoint import model_name
from penstock.client.broadcast.trainer import make_manifest
from penstock.config import RouterConfig
from penstock.errors import CheckpointError
from penstock.kv.adapter_files import WEIGHTS_FILE, read_adapter_ref
from penstock.sizing.model_shape import find_shape
from router.text.model_card import ModelCard
from tests.engine.memory.test_memory_plan import HOST, tensors_of
from tests.engine.parallel.test_tensor_parallel import GREEDY, PROMPT, SALT, check_equal, config
from tests.support.engine.adapters import make_adapter
from tests.support.engine.checkpoints import make_checkpoint

FAMILIES = ("gemma3_text", "llama4_text")
_SIZES = {"image_size": 28, "patch_size": 14, "intermediate_size": 64, "num_hidden_layers": 1}
_VISION = {**_SIZES, "hidden_size": 16, "num_attention_heads": 2}
_PROJECTED = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
_PREFIXES = ("language_model.model.", "language_model.lm_head.", "vision_model.", "vision_tower.", "multi_modal_")


def make_multi_modal(family: str, folder: Path) -> PreTrainedModel:
    """Writes the folder as `transformers` does, with random weights everywhere, and returns the model."""
    text = AutoConfig.from_pretrained(make_checkpoint(family, folder.with_name(f"{folder.name}-text"))).to_dict()
    torch.manual_seed(1)
    model: PreTrainedModel
    if family == "gemma3_text":
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4)
        )
    else:
        model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=_VISION | _PROJECTED))
    model.save_pretrained(folder)
    return model.eval()


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def greedy_tokens(model: PreTrainedModel, count: int) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        while len(tokens) < len(PROMPT) + count:
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_multi_modal_folder_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_multi_modal(family, tmp_path / "model")
    wanted = greedy_tokens(model, 6)
    assert generate(Engine.load(config(tmp_path / "model")), PROMPT, GREEDY, SALT) == wanted
    # The names of a model in memory, under which some trainers store it.
    file = tmp_path / "model" / "model.safetensors"
    assert all(name.startswith(_PREFIXES) for name in load_file(file)), "the published layout is not the one tested"
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace("vision_", "model.vision_"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    assert generate(Engine.load(config(tmp_path / "model")), PROMPT, GREEDY, SALT) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_the_memory_plan_count_the_language_model_alone(family: str, tmp_path: Path) -> None:
    make_multi_modal(family, tmp_path / "model")
    check_equal(tmp_path / "model", 2)
    wanted = config(tmp_path / "model", device="cpu", share_weights=False)
    held = tensors_of(Engine.load(wanted).runner._model)
    assert plan_memory(wanted, HOST).weight_bytes == sum(tensor.numel() * tensor.itemsize for tensor in held.values())


def test_what_published_files_leave_out_is_as_in_transformers(tmp_path: Path) -> None:
    """The published config.json of Gemma-3 4B names only what differs from the defaults."""
    short = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    short |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    whole |= {"eos_token_id": [1, 106], "initializer_range": 0.02, "mm_tokens_per_image": 256, "vision_config": {}}
    whole |= {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": short}))
    found = ModelConfig.from_folder(tmp_path, has_weights=False)
    full = AutoConfig.from_pretrained(tmp_path).text_config.to_dict()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(json.dumps(whole | {"text_config": full}))
    wanted = ModelConfig.from_folder(tmp_path / "full", has_weights=False)
    assert found == wanted
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim) == (34, 8, 4, 256)
    assert (found.vocab_size, found.context_length, found.dtype) == (262208, 131072, "bfloat16")
    assert (found.eos_token_ids, found.tie_embeddings) == ({1, 106}, True)
    assert (found.windows[0], found.windows[5]) == (1024, None)
    assert find_shape(str(tmp_path)).num_parameters == pytest.approx(3.88e9, rel=0.01)
    assert ModelCard.load(RouterConfig(model=str(tmp_path), workers=("localhost:1",))).vocab_size == 262208


def test_the_published_configuration_of_llama_4_scout_is_read(tmp_path: Path) -> None:
    text = {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
        "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
    }  # fmt: skip
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    whole |= {"boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    found = ModelConfig.from_folder(tmp_path, has_weights=False)
    assert found.experts is not None
    assert found.irope is not None
    assert (found.experts.num_experts, len(found.experts.layers), found.dtype) == (16, 48, "bfloat16")
    assert len(found.irope.rotated) == len(found.irope.chunked) == 36
    assert find_shape(str(tmp_path)).num_parameters == pytest.approx(107.8e9, rel=0.01)  # without the vision tower


def test_only_a_multi_modal_folder_may_hold_what_reads_images(tmp_path: Path) -> None:
    make_multi_modal("gemma3_text", tmp_path / "model")
    text = json.loads((tmp_path / "model" / "config.json").read_text())["text_config"]
    shutil.copytree(tmp_path / "model", tmp_path / "claims-text")
    (tmp_path / "claims-text" / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=r"is not part of the model that config.json describes"):
        Engine.load(config(tmp_path / "claims-text"))
    edit_config(tmp_path / "model", audio_config={"layers": 1})
    with pytest.raises(CheckpointError, match=r"audio_config = .* is unknown for Gemma3ForCausalLM and could change"):
        Engine.load(config(tmp_path / "model"))


def test_a_tensor_that_is_stored_under_two_names_is_refused(tmp_path: Path) -> None:
    make_multi_modal("gemma3_text", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model.norm.weight and .*model.norm.weight are one tensor"):
        Engine.load(config(tmp_path / "model"))


@pytest.mark.parametrize("names", ["language_model.model.layers.", "model.language_model.layers."])
def test_an_adapter_may_name_the_modules_as_the_folder_does(names: str, tmp_path: Path) -> None:
    folder = make_checkpoint("gemma3_text", tmp_path / "model")
    ref = make_adapter(folder, tmp_path / "adapter")
    products = adapted_products(ModelConfig.from_folder(folder))
    wanted = read_adapter(ref, products, 8)
    file = Path(ref.path) / WEIGHTS_FILE
    save_file({name.replace("model.layers.", names): tensor for name, tensor in load_file(file).items()}, file)
    found = read_adapter(read_adapter_ref("adapter", ref.path), products, 8)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(a, b) for name in found for a, b in zip(found[name], wanted[name], strict=True))


def test_a_broadcast_may_name_the_tensors_as_the_folder_does(tmp_path: Path) -> None:
    make_multi_modal("gemma3_text", tmp_path / "model")
    model = ModelConfig.from_folder(tmp_path / "model")
    for tensors in (
        load_file(tmp_path / "model" / "model.safetensors"),
        load_file(tmp_path / "model-text" / "model.safetensors"),
    ):
        check_manifest(make_manifest(tensors), model)


def test_other_names_stay_as_they_are() -> None:
    assert model_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert model_name("language_model.other.weight") == "language_model.other.weight"
