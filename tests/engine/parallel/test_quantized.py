"""Tests a replica of two ranks with quantized weights: each takes its part of codes and scales, or refuses with a
reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.quality import texts
from engine.engine import Engine
from engine.generate import generate
from engine.memory.plan import plan_memory
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from tests.engine.memory.test_memory_plan import HOST
from tests.engine.parallel.test_tensor_parallel import GREEDY, MODEL, SALT, launch_threads
from tests.engine.weights.test_quantized_weights import LAYOUTS, Quantizer, awq, gptq, packed
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.int8_activations import quantize_checkpoint

PROMPT = texts(num_texts=1, num_tokens=60)[0]  # each next token is likelier than any other by 9 nats
# A rank of the bundled model has 96 and 256 inputs of the products that are split along their inputs.
CHECKPOINTS: dict[str, Quantizer] = {
    "gptq": gptq(4, 32, False, False),
    "awq": awq(32),
    "packed 8 bits in groups": packed(8, 32, False),
    "fp8 channel": LAYOUTS["fp8 channel"],
}


def load(folder: Path, num_ranks: int, **settings: object) -> Engine:
    values = {"model": str(folder), "num_pages": 16, "num_threads": 1, "tensor_parallel": num_ranks, **settings}
    return Engine.load(EngineConfig.model_validate(values), launch=launch_threads)


def tokens_of(folder: Path, num_ranks: int, **settings: object) -> list[int]:
    engine = load(folder, num_ranks, **settings)
    try:
        return generate(engine, PROMPT, GREEDY, SALT)
    finally:
        engine.close()


@pytest.mark.parametrize("layout", [*CHECKPOINTS, "int8", "w8a8"])
def test_two_ranks_generate_the_tokens_of_one(layout: str, tmp_path: Path) -> None:
    """Runs in bf16, the dtype of quantized products, over a text of which the model is certain, because sums over ranks
    round differently."""
    folder, settings = MODEL, {"dtype": "bfloat16", "quantization": layout}
    if layout == "w8a8":
        folder, _ = quantize_checkpoint(MODEL, tmp_path, layout)
        settings = {"dtype": "bfloat16"}
    if layout in CHECKPOINTS:
        CHECKPOINTS[layout].convert(MODEL, tmp_path / "quantized", tmp_path / "plain")
        folder, settings = tmp_path / "quantized", {"dtype": "bfloat16"}
    assert tokens_of(folder, 2, **settings) == tokens_of(folder, 1, **settings)


def test_a_split_within_a_quantization_group_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "whole", hidden_size=64, intermediate_size=96, head_dim=32)
    gptq(4, 32, True, False).convert(folder, tmp_path / "quantized", tmp_path / "plain")
    problem = (
        r"engine.tensor_parallel = 2 gives a rank 48 of the 96 inputs of model.layers.0.mlp.down_proj.weight, which "
        r"splits its groups of 32 that share a scale; give a number of ranks that leaves each a multiple of 32, or {}"
    )
    for name, quantization, fix in (
        ("quantized", "none", "weights in groups that divide 48"),
        ("whole", "int4", "engine.quantization = int8, which scales rows"),
    ):
        settings = {"model": str(tmp_path / name), "quantization": quantization, "tensor_parallel": 2}
        config = EngineConfig.model_validate({**settings, "dtype": "bfloat16", "num_pages": 16})
        with pytest.raises(ConfigError, match=problem.format(fix)):
            plan_memory(config, HOST)
        with pytest.raises(ConfigError, match=problem.format(fix)):
            Engine.load(config, launch=launch_threads)
