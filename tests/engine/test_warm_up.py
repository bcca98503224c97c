"""Tests what an engine prepares before its first request, and which failures it survives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.generate import generate
from engine.graphs.warm_up import warm_up_batches
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from penstock.types import Grammar, GrammarKind, PageId, SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"


def test_a_tokenizer_unusable_for_grammars_only_disables_structured_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine = Engine.load(EngineConfig(model=str(folder), num_pages=16, num_threads=1))
    engine.warm_up()
    assert "structured output will be refused" in caplog.text
    assert "grammars cannot use it" in caplog.text
    assert len(generate(engine, [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True), b"")) == 3
    with pytest.raises(CheckpointError, match="grammars cannot use it"):
        engine.grammars.compile(Grammar(GrammarKind.REGEX, "a+"))


def test_warm_up_takes_steps_of_every_size_up_to_the_largest() -> None:
    """A tile may be chosen for 33 to 64 tokens, of which a step of 40 is the largest."""
    sizes = [batch.token_ids_T.size for batch in warm_up_batches(PageId(0), 16, 4096, most_tokens=40)]
    assert list(dict.fromkeys(sizes)) == [1, 2, 4, 8, 16, 32, 40]
