"""Tests decodes that FlashInfer computes inside CUDA graphs, over its double: planned before each replay, in buffers
that never move."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.graphs.cuda_graphs import GraphRunner
from engine.kernels.attention_interface import Lengths
from engine.kernels.libraries.attention import LibraryAttention
from engine.kernels.libraries.flashinfer_memory import (
    GROUP_FOR_TENSOR_CORES,
    WORKSPACE_BYTES,
    captured_bytes,
    captured_workspace_bytes,
)
from engine.kernels.reference import TorchAttention
from engine.parallel.model_part import ModelPart
from penstock.config import EngineConfig
from tests.engine.kernels.test_library_attention import ADAPTER, make_problem
from tests.engine.step.test_graphs import decode
from tests.support.engine import attention_doubles
from tests.support.engine.attention_doubles import BatchDecodeWithPagedKVCacheWrapper, Replays
from tests.support.engine.checkpoints import make_checkpoint

CPU = torch.device("cpu")
SIZE, PAGE_SIZE, WIDTH = 5, 16, 8


class StrictGraph:
    """Captures and replays as CUDA does: only kernels run, so nothing can be planned."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Replays, "is_running", True)
                run()

        run()
        replay()
        return replay


@pytest.fixture(autouse=True)
def _doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    attention_doubles.install(monkeypatch)
    monkeypatch.setattr(BatchDecodeWithPagedKVCacheWrapper, "captured", [])
    monkeypatch.setattr("engine.graphs.cuda_graphs.CudaCapture", StrictGraph)
    yield
    sys.modules.pop(ADAPTER, None)


class Clean(TorchAttention):
    """Replaces NaNs in pages that nobody has written, which the reference multiplies by zero."""

    def paged_attention(self, q_TNH: torch.Tensor, pool_layer: torch.Tensor, *others: Any) -> torch.Tensor:
        return super().paged_attention(q_TNH, pool_layer.nan_to_num(), *others)


@pytest.fixture
def attention() -> LibraryAttention:
    module: Any = importlib.import_module(ADAPTER)
    module.WORKSPACE_BYTES = 4096
    module.PLAN_BYTES = 64
    module.captured_workspace_bytes = lambda *sizes: 4096
    return LibraryAttention("flashinfer", Clean(), module.FlashInferAttention(CPU))


def test_captured_decodes_get_the_plan_of_computed_ones(attention: LibraryAttention) -> None:
    planner = attention.planner
    assert planner is not None
    planner.plan_decodes(torch.full((SIZE, WIDTH), 1, dtype=torch.int32), np.ones(SIZE, np.int64), PAGE_SIZE)
    q_BNH, pool = torch.zeros(SIZE, 6, 24), torch.zeros(40, 2, 2, PAGE_SIZE, 24)
    found: dict[int | None, torch.Tensor] = {}
    meta, _, _ = make_problem([1] * SIZE, [1] * SIZE)
    captured_meta = replace(meta, lengths=None)

    def run() -> None:
        for window in (None, 13):
            found[window] = attention.paged_attention(q_BNH, pool, captured_meta, 0.3, window)

    graph = StrictGraph()(run)
    wrappers = BatchDecodeWithPagedKVCacheWrapper.captured
    addresses = [wrapper.addresses for wrapper in wrappers]
    assert [wrapper.num_plans for wrapper in wrappers] == [1, 1]
    for contexts in ([17, 70, 1], [128, 16, 33], [1, 1, 1]):
        meta, small_pool, q_TNH = make_problem([1] * len(contexts), contexts)
        pool.zero_()[: len(small_pool)] = small_pool.nan_to_num()
        q_BNH.zero_()[: len(q_TNH)] = q_TNH
        table_BW = torch.full((SIZE, WIDTH), len(small_pool), dtype=torch.int32)
        table_BW[: len(contexts), : meta.page_table_BP.shape[1]] = meta.page_table_BP
        planner.plan_decodes(table_BW, np.array([*contexts, 1, 1]), PAGE_SIZE)
        graph()
        for window, wrapper in zip((None, 13), wrappers, strict=True):
            computed = attention.paged_attention(q_TNH, pool, meta, 0.3, window)
            torch.testing.assert_close(found[window][: len(contexts)], computed)
            key = next(key for key in attention._library._planned if key.window == window)  # type: ignore[attr-defined]
            eager = attention._library._planned[key].wrapper  # type: ignore[attr-defined]
            (starts, pages, last, options), wanted = wrapper.planned[-1], eager.planned[-1]
            count, num_pages = len(contexts), wanted[0][-1]
            assert (starts[: count + 1], pages[:num_pages], last[:count], options) == wanted
            assert starts[count:] == [num_pages, num_pages + 1, num_pages + 2]
            assert (pages[num_pages:], last[count:]) == ([len(small_pool)] * 2, [1, 1]), "padding"
    assert [wrapper.num_plans for wrapper in wrappers] == [4, 4]
    assert [wrapper.addresses for wrapper in wrappers] == addresses


@pytest.mark.parametrize("sliding_window", [None, 11])
def test_replayed_steps_sample_the_tokens_of_computed_ones(
    sliding_window: int | None,
    attention: LibraryAttention,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint("mistral", tmp_path, sliding_window=sliding_window)
    config = EngineConfig(
        model=str(folder), dtype="float32", num_pages=64, num_threads=1, attention="torch", cuda_graphs=8
    )
    monkeypatch.setattr("engine.parallel.model_part.select_backend", lambda name, device: attention)
    engine = Engine.load(config)
    wanted = decode(engine, ahead=False)
    monkeypatch.setattr(ModelPart, "captures_graphs", True)
    engine = Engine.load(config)
    assert isinstance(engine._graphs, GraphRunner)
    engine.capture_graphs()
    wrappers = BatchDecodeWithPagedKVCacheWrapper.captured
    assert len(wrappers) == len(engine._graphs.sizes()), "a wrapper for each bucket, made before its capture"
    addresses = [wrapper.addresses for wrapper in wrappers]
    assert decode(engine, ahead=False) == wanted
    assert decode(engine, ahead=True) == wanted
    assert engine._graphs.num_replays > 0
    assert sum(wrapper.num_plans - 1 for wrapper in wrappers) == engine._graphs.num_replays
    assert wrappers == BatchDecodeWithPagedKVCacheWrapper.captured
    assert [wrapper.addresses for wrapper in wrappers] == addresses


def test_every_bucket_shares_the_buffers(attention: LibraryAttention) -> None:
    planner = attention.planner
    assert planner is not None
    for size in (4, 2):
        meta, pool, q_TNH = make_problem([1] * size, [20] * size)
        planner.plan_decodes(torch.zeros((size, WIDTH), dtype=torch.int32), np.ones(size, np.int64), PAGE_SIZE)
        attention.paged_attention(q_TNH, pool.nan_to_num(), replace(meta, lengths=None), 0.3, None)
    large, small = BatchDecodeWithPagedKVCacheWrapper.captured
    assert large.addresses == small.addresses
    with pytest.raises(AssertionError, match="another wrapper's plan"):
        large.run(torch.zeros(4, 6, 24), pool.nan_to_num(), out=torch.zeros(4, 6, 24))


def test_a_step_whose_lengths_are_known_is_not_taken_for_a_captured_one(attention: LibraryAttention) -> None:
    meta, pool, q_TNH = make_problem([1, 1], [20, 3])
    assert isinstance(meta.lengths, Lengths)
    attention.paged_attention(q_TNH, pool.nan_to_num(), meta, 0.3, None)
    assert not BatchDecodeWithPagedKVCacheWrapper.captured


def test_the_workspace_of_captured_decodes_holds_a_tile_for_each_sequence() -> None:
    assert captured_workspace_bytes(32, 8, 128, 256) == WORKSPACE_BYTES, "large enough"
    wide = captured_workspace_bytes(64, 8, 128, 256)
    assert wide == 64 * (128 + 255) * 16 * 129 * 4
    assert captured_workspace_bytes(8 * (GROUP_FOR_TENSOR_CORES - 1), 8, 128, 4096) == WORKSPACE_BYTES
    assert captured_bytes(64, 8, 128, 256, 8192) - captured_bytes(32, 8, 128, 256, 8192) == wide
