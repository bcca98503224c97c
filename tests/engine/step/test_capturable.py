"""Tests that a captured decode step neither waits for the device nor copies to it, in any model family.

Tensors are on the meta device instead of a GPU: they have shapes but no values, so waiting for a value fails, and
tensors created on the host are detected. Triton's launches are recorded but not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from engine.graphs.cuda_graphs import GraphRunner
from engine.kernels.backends import select_ops
from engine.kernels.kv_quantization import layers_of
from engine.kernels.triton import common
from engine.kernels.triton.attention import tuning
from engine.kernels.triton.backend import TritonAttention
from engine.layers.feed_forward import ExpertFeedForward
from engine.memory.estimates import captures_graphs, make_layout
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.shapes import tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.collectives import SINGLE_RANK, SingleRank
from engine.parallel.shard import Shard, shard_layout
from engine.step.model_runner import ModelRunner
from penstock.config import EngineConfig
from tests.support.engine.checkpoints import FAMILIES, make_checkpoint

DEVICE = torch.device("meta")
MAX_CONTEXT, PAGE_SIZE, BATCH = 4096, 16, 8


class HollowReader:
    """Stands in for `engine.weights.reader.WeightReader`; its weights have no values."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], prefix: str = "") -> None:
        self._shapes, self._prefix = shapes, prefix

    def read(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[self._prefix + name], dtype=torch.bfloat16, device=DEVICE)

    def __call__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def weight(self, name: str, is_expert: bool = False) -> torch.Tensor:
        return self.read(name)

    def head(self, name: str, tied: torch.Tensor | None) -> torch.Tensor:
        return self.read(name) if tied is None else tied

    def within(self, prefix: str) -> HollowReader:
        return HollowReader(self._shapes, prefix)


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(leaf.device != DEVICE for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)):
            self._found.append(str(func))
        return result


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            self._found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching() -> Iterator[list[str]]:
    """Yields a list that collects the operations on host memory."""
    found: list[str] = []
    with _Operations(found), _Calls(found):
        yield found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the launched kernels by name, with their grids, in order."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def run(kernel: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(not isinstance(arg, torch.Tensor) or arg.device == DEVICE for arg in args)
        found.append((kernel.fn.__name__, grid))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(common, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(tuning, "device_name", lambda device: "none")
    return found


class RankAlone(SingleRank):
    """A rank of two, each with half of the experts, whose collectives do nothing."""

    shard = Shard(1, 2, has_whole_experts=True)


def make_graphs(folder: Path, kv_dtype: str, group: SingleRank) -> GraphRunner:
    config = EngineConfig.model_validate({"model": str(folder), "dtype": "bfloat16", "kv_dtype": kv_dtype})
    model = ModelConfig.from_folder(folder)
    assert captures_graphs(config, model, "cuda")
    layout = shard_layout(make_layout(config, model), group.shard)
    slices = tensor_slices(model, group.shard)
    shapes = {
        name: slices[name].shape(shape) if name in slices else shape for name, shape in tensor_shapes(model).items()
    }
    decoder = Decoder(model, HollowReader(shapes), MAX_CONTEXT, DEVICE, group)  # type: ignore[arg-type]
    for layer in decoder._layers:
        if isinstance(layer.feed_forward, ExpertFeedForward):  # in one tensor, as on a GPU
            for experts in (layer.feed_forward._gate_up, layer.feed_forward._down):
                experts.weight_EOI = torch.stack([expert._weight_OI for expert in experts.experts])  # type: ignore[misc]
    kv_pages = torch.empty(layout.shape(64), dtype=getattr(torch, layout.storage_dtype), device=DEVICE)
    attention = TritonAttention()
    runner = ModelRunner(decoder, layers_of(kv_pages, layout), attention, select_ops(attention))
    return GraphRunner(runner.run, [1, BATCH], MAX_CONTEXT, PAGE_SIZE, 63, DEVICE)


def check(
    folder: Path, launches: list[tuple[str, tuple[int, ...]]], kv_dtype: str, group: SingleRank = SINGLE_RANK
) -> set[str]:
    touched: list[str] = []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        with watching() as found:
            launches.clear()
            run()
            first = launches.copy()
            launches.clear()
            run()
        touched.extend(found)
        assert launches == first, "a second run launches something else"
        return run

    with torch.inference_mode():
        graphs = make_graphs(folder, kv_dtype, group)
        for size in graphs.sizes():
            graphs.capture(size, lambda: capture)
        assert graphs.is_captured
    assert not touched
    assert all(math.prod(grid) > 0 for _, grid in launches)
    return {name for name, _ in launches}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_neither_waits_for_the_device_nor_copies_to_it(
    family: str, tmp_path: Path, launches: list[tuple[str, tuple[int, ...]]]
) -> None:
    kernels = check(make_checkpoint(family, tmp_path), launches, "auto")
    is_latent = family.startswith("deepseek")
    assert ("_latent_kernel" if is_latent else "_decode_kernel") in kernels
    assert ("_join_kernel" if is_latent else "_join_items_kernel") in kernels, "a context of this length is split"


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "mixtral"])
def test_a_rank_with_whole_experts_can_be_captured(
    family: str, tmp_path: Path, launches: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert "_gemm_kernel" in check(
        make_checkpoint(family, tmp_path, num_local_experts=6), launches, "auto", RankAlone()
    )


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_quantized_pages_can_be_captured(
    family: str, tmp_path: Path, launches: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert "_write_quantized_kernel" in check(make_checkpoint(family, tmp_path), launches, "fp8")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.tensor([1, 2, 3], device=DEVICE),
        lambda x: x[torch.arange(3)],
    ],
)
def test_operations_that_cannot_be_captured_are_detected(call: Callable[[torch.Tensor], object]) -> None:
    with watching() as found:
        try:
            call(torch.zeros(3, device=DEVICE))
        except (RuntimeError, NotImplementedError):  # there is no value to wait for
            return
    assert found
