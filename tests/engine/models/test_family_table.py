"""Tests the table of families: it is current, each cell has a test, and families that it calls refused are refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration

from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from engine.models.families import FAMILIES
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from penstock.types import SamplingParams
from tests.engine.models import table, test_families
from tests.support.engine import checkpoints
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.isas import needs_native

MODEL_TYPES = {family.model_type for family in FAMILIES}


def test_the_page_shows_the_table() -> None:
    page = table.PAGE.read_text()
    assert page == table.with_table(page), "run python -m tests.engine.models.table --write"


@pytest.mark.parametrize("column", table.COLUMNS)
def test_each_cell_of_a_column_has_a_test(column: str) -> None:
    module, name = table.COLUMNS[column]
    if column == "colocated":  # parametrized by its fixture
        assert {family for family, _ in test_families.CASES.values()} == MODEL_TYPES
        return
    function = getattr(importlib.import_module(module), name)
    (values,) = (mark.args[1] for mark in function.pytestmark if mark.name == "parametrize")
    wanted = {family.model_type for family in FAMILIES if family.experts is not None or column != table.OF_EXPERTS}
    assert set(values) >= wanted


def test_every_family_has_a_small_checkpoint_and_a_row() -> None:
    assert set(checkpoints.FAMILIES) == set(table.MODELS) == MODEL_TYPES


@pytest.mark.parametrize("architecture", table.REFUSED)
def test_other_families_are_refused(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(CheckpointError, match=rf"{architecture}.* is not supported; give a checkpoint of one of Llama"):
        ModelConfig.from_folder(tmp_path)


def test_the_text_model_of_a_llama_4_with_images_is_served_once_saved(tmp_path: Path) -> None:
    text = AutoConfig.from_pretrained(make_checkpoint("llama4_text", tmp_path / "small"))
    sizes = {"image_size": 28, "patch_size": 14, "intermediate_size": 64, "num_hidden_layers": 1}
    vision = {**sizes, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    heads = {"hidden_size": 16, "num_attention_heads": 2}
    config = Llama4Config(text_config=text.to_dict(), vision_config={**vision, **heads})
    model = Llama4ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"Llama4ForCausalLM.from_pretrained\(folder\).save_pretrained\(other\)"):
        ModelConfig.from_folder(tmp_path / "whole")
    Llama4ForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "text")
    engine = Engine.load(EngineConfig(model=str(tmp_path / "text"), num_pages=16, num_threads=1))
    prompt, greedy = list(range(2, 40)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with torch.inference_mode():
        wanted = int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    assert generate(engine, prompt, greedy)[0] == wanted


@needs_native
@pytest.mark.parametrize("family", sorted(MODEL_TYPES))
def test_dense_families_without_output_norms_run_in_one_call_on_a_cpu(family: str, tmp_path: Path) -> None:
    heads = {} if family.startswith("deepseek") else {"head_dim": 32}
    folder = make_checkpoint(family, tmp_path, dtype=torch.bfloat16, **heads)
    engine = Engine.load(EngineConfig(model=str(folder), num_pages=4, dtype="bfloat16", num_threads=1))
    assert (engine.runner.stack is not None) == (family in table.ONE_CALL)
