"""Tests adapters on a replica of two ranks: the tokens of one rank, and one error if a rank cannot read the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from penstock.kv.adapter_files import WEIGHTS_FILE, read_adapter_ref
from penstock.types import SamplingParams
from tests.engine.parallel.test_tensor_parallel import launch_threads
from tests.support.engine.adapters import make_adapter
from tests.support.engine.checkpoints import make_checkpoint

PROMPT = [3 + (7 * place) % 290 for place in range(21)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_two_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    ref = make_adapter(folder, tmp_path / "adapter")
    config = EngineConfig(model=str(folder), dtype="float32", page_size=8, num_pages=16, max_adapters=1)
    single, split = (
        Engine.load(config),
        Engine.load(config.model_copy(update={"tensor_parallel": 2}), launch=launch_threads),
    )
    wanted = generate(single, PROMPT, GREEDY, adapter=ref)
    try:
        assert generate(split, PROMPT, GREEDY, adapter=ref) == wanted != generate(single, PROMPT, GREEDY, b"plain")
        damaged = tmp_path / "damaged"
        make_adapter(folder, damaged)
        (damaged / WEIGHTS_FILE).write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match="is damaged"):
            generate(split, PROMPT, GREEDY, b"damaged", adapter=read_adapter_ref("damaged", str(damaged)))
        assert generate(split, PROMPT, GREEDY, b"again", adapter=ref) == wanted
    finally:
        single.close()
        split.close()
