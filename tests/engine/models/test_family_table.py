"""Tests the table of families: it is current, each cell has a test, and families that it calls refused are refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.models.config import ModelConfig
from engine.models.families import FAMILIES
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
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


@needs_native
@pytest.mark.parametrize("family", sorted(MODEL_TYPES))
def test_dense_families_without_output_norms_run_in_one_call_on_a_cpu(family: str, tmp_path: Path) -> None:
    heads = {} if family.startswith("deepseek") else {"head_dim": 32}
    folder = make_checkpoint(family, tmp_path, dtype=torch.bfloat16, **heads)
    engine = Engine.load(EngineConfig(model=str(folder), num_pages=4, dtype="bfloat16", num_threads=1))
    assert (engine.runner.stack is not None) == (family in table.ONE_CALL)
