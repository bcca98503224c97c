"""Tests expert parallelism: ranks that hold some experts whole compute what one rank computes, and read only those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.kernels.backends import select_backend, select_ops
from engine.layers.feed_forward import ExpertFeedForward
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from engine.models.loader import open_weights
from engine.models.shapes import tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.collectives import SingleRank
from engine.parallel.shard import Shard
from engine.weights.reader import WeightReader
from penstock.errors import ConfigError
from tests.engine.memory.test_memory_plan import HOST, tensors_of
from tests.engine.parallel.test_tensor_parallel import check_equal, config, launch_threads
from tests.engine.weights.test_quantized_weights import LAYOUTS
from tests.support.engine.checkpoints import make_checkpoint

WITH_EXPERTS = [family.model_type for family in FAMILIES if family.experts is not None]
CPU = torch.device("cpu")


def make_even(family: str, folder: Path, **overrides: Any) -> Path:
    """Makes a checkpoint with a number of experts that two divides."""
    of_five = {"num_local_experts": 6} if family in ("gpt_oss", "llama4_text", "mixtral") else {}
    return make_checkpoint(family, folder, **of_five, **overrides)


class RankAlone(SingleRank):
    """A rank of several whose sums lack the other ranks' parts."""

    def __init__(self, rank: int, num_ranks: int = 2) -> None:
        self.shard = Shard(rank, num_ranks, has_whole_experts=True)


def load_part(folder: Path, group: SingleRank, dtype: torch.dtype, progress: list[float] | None = None) -> Decoder:
    model, done = ModelConfig.from_folder(folder), progress if progress is not None else []
    with open_weights(folder, model, dtype, CPU, group, None, done.append) as reader:
        return Decoder(model, reader, 64, CPU, group)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_two_ranks_with_whole_experts_generate_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    check_equal(make_even(family, tmp_path), 2, expert_parallel=True)


def test_three_ranks_and_a_rank_whose_experts_no_token_takes(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 96, "hidden_size": 48}
    folder = make_checkpoint("mixtral", tmp_path, num_local_experts=3, num_experts_per_tok=1, **sizes)
    check_equal(folder, 3, expert_parallel=True)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mixtral", "qwen3_moe"])
def test_the_parts_of_quantized_experts_add_up(family: str, tmp_path: Path) -> None:
    """Experts stay in codes on both sides, so that a sum over two ranks differs only by its rounding to bf16."""
    widths = {} if family == "mixtral" else {"moe_intermediate_size": 64}
    folder = make_even(family, tmp_path / "plain", hidden_size=64, intermediate_size=64, **widths)
    LAYOUTS["int8 channel"].convert(folder, tmp_path / "quantized", tmp_path / "values")
    whole, *parts = (
        load_part(tmp_path / "quantized", group, torch.bfloat16) for group in (SingleRank(), RankAlone(0), RankAlone(1))
    )
    ops, x_TD = select_ops(select_backend("auto", CPU)), torch.randn(9, 64, generator=torch.manual_seed(0)).bfloat16()
    blocks = [
        (layer.feed_forward, *(part._layers[at].feed_forward for part in parts))
        for at, layer in enumerate(whole._layers)
    ]
    with_experts = [block for block in blocks if isinstance(block[0], ExpertFeedForward)]
    assert with_experts
    for block, first, second in with_experts:
        wanted = block(x_TD, ops)
        scale = wanted.abs().max().item()
        torch.testing.assert_close(first(x_TD, ops) + second(x_TD, ops), wanted, rtol=2**-7, atol=2**-8 * scale)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_each_expert_is_read_by_one_rank(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_even(family, tmp_path)
    model = ModelConfig.from_folder(folder)
    assert model.experts is not None
    read: list[set[str]] = []
    shapes: list[tuple[int, ...]] = []
    original = WeightReader.read

    def record(self: WeightReader, name: str) -> torch.Tensor:
        tensor = original(self, name)
        if ".experts." in name:
            read[-1].add(name)
            shapes.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(WeightReader, "read", record)
    for rank in range(2):
        read.append(set())
        progress: list[float] = []
        load_part(folder, RankAlone(rank), torch.float32, progress)
        assert progress[-1] == 1.0
    of_experts = {name for name in tensor_shapes(model) if ".experts." in name}
    if model.experts.names.is_stacked:
        assert read == [of_experts, of_experts]
        assert {shape[0] for shape in shapes} == {model.experts.num_experts // 2}
    else:
        assert read[0] | read[1] == of_experts
        assert not read[0] & read[1]
        assert len(read[0]) == len(read[1])


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_moe"])
def test_the_memory_plan_equals_what_a_rank_holds(family: str, tmp_path: Path) -> None:
    settings = {"tensor_parallel": 2, "expert_parallel": True, "share_weights": False, "device": "cpu"}
    wanted = config(make_even(family, tmp_path), **settings)
    plan = plan_memory(wanted, HOST)
    split = Engine.load(wanted, launch=launch_threads)
    try:
        held = tensors_of(split.runner._model)
        assert plan.weight_bytes == sum(tensor.numel() * tensor.itemsize for tensor in held.values())
    finally:
        split.close()


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("llama", {"tensor_parallel": 2}, r"engine.expert_parallel = true: .* has no experts; give .* = false"),
        ("mixtral", {}, "engine.tensor_parallel = 1 gives one; give engine.tensor_parallel = 2 or more"),
        (
            "mixtral",
            {"tensor_parallel": 2},
            "engine.tensor_parallel = 2 does not divide the model's 5 experts, and engine.expert_parallel = true keeps "
            "each whole; give a number that does",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    family: str, settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    wanted = config(make_checkpoint(family, tmp_path), expert_parallel=True, **settings)
    with pytest.raises(ConfigError, match=problem):
        plan_memory(wanted, HOST)
    with pytest.raises(ConfigError, match=problem):
        Engine.load(wanted, launch=launch_threads)


def test_an_experts_width_need_not_divide(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=25))
    assert tensor_slices(model, Shard(0, 2, has_whole_experts=True))
    with pytest.raises(ConfigError, match="does not divide the model's 25 of an expert's width"):
        tensor_slices(model, Shard(0, 2))
