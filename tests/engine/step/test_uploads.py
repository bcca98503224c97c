"""Tests that a step's arrays reach a GPU unchanged in a single copy, and what else a steady step launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.graphs.cuda_graphs import GraphRunner
from engine.kernels.upload import upload_all
from engine.parallel.collectives import SINGLE_RANK
from engine.sampling.row_params import SamplingTensors
from engine.sampling.sampler import Sampled
from engine.step.batch import Batch, ForwardOutput, build_host_batch, to_device
from engine.step.compute import PreparedStep, SampledTokens, StepDevice, forward_step, prepare_step
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import PageId, RequestId, SamplingParams

GPU: Any = SimpleNamespace(type="cuda")
CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes of copies from pinned memory to the GPU, for which the CPU stands in."""
    sizes: list[int] = []
    empty, copy_to = torch.empty, torch.Tensor.to

    def make(*shape: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*shape, **settings)

    def to(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        if arguments[:1] != (GPU,):
            return copy_to(tensor, *arguments, **settings)
        assert settings["non_blocking"]
        sizes.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return sizes


def test_arrays_of_all_types_share_one_copy(copies: list[int]) -> None:
    arrays: list[np.ndarray] = [
        np.arange(5, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
        np.zeros(0, np.float64),
        np.linspace(0, 1, 3, dtype=np.float64),
        np.array([1.5], np.float32),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2],
    ]
    tensors = upload_all(arrays, GPU)
    assert copies == [48 + 32 + 0 + 32 + 16 + 32]
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_a_step_and_its_sampling_take_one_copy_each(copies: list[int]) -> None:
    samplings = [SamplingParams(max_tokens=9, temperature=0.5 * i, top_p=0.9, seed=2**64 - 1 - i) for i in range(3)]
    work = []
    for number, sampling in enumerate(samplings):
        tokens = list(range(2, 9 + 20 * number))
        sequence = Sequence(RequestId(str(number)), tokens, len(tokens), sampling, b"salt")
        sequence.pages.extend(PageId(page) for page in range(5 * number, 5 * number + 5))
        work.append(ScheduledSequence(sequence, len(tokens)))
    host = build_host_batch(work, 16)
    batch, expected = to_device(host, GPU), to_device(host, CPU)
    assert len(copies) == 1
    for name in ("token_ids_T", "positions_T", "logit_rows_R"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))
    for name in ("page_table_BP", "query_start_B1", "context_lens_B", "slot_page_T", "slot_offset_T"):
        found, wanted = getattr(batch.meta, name), getattr(expected.meta, name)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    rows = SamplingTensors.of(samplings, [3, 4, 5], 1000, GPU)
    wanted_rows = SamplingTensors.of(samplings, [3, 4, 5], 1000, CPU)
    assert len(copies) == 2
    for name in ("temperature_B", "top_k_B", "top_p_B", "min_p_B", "seed_B", "position_B"):
        assert torch.equal(getattr(rows, name), getattr(wanted_rows, name))


class _Launches(TorchDispatchMode):
    """Collects the names of operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


class SteadyDecode:
    """`num_rows` rows of one context that decode ahead. A GPU's place is taken by the CPU, a graph's by nothing."""

    def __init__(self, num_rows: int, context: int) -> None:
        self._table = RowTable(16, EndConditions((), 10**6))
        for number in range(num_rows):
            sampling = SamplingParams(max_tokens=10**5, temperature=0.7, top_p=0.9, seed=number)
            num_tokens = context - 15 + number % 16
            sequence = Sequence(RequestId(str(number)), [5] * num_tokens, num_tokens, sampling, b"")
            sequence.pages = [PageId(page) for page in range(-(-num_tokens // 16))]
            sequence.num_computed_tokens = num_tokens - 1
            self._table.add(sequence)
        self._graphs = GraphRunner(_no_logits, [num_rows], context + 1000, 16, 0, CPU)
        for size in self._graphs.sizes():
            self._graphs.capture(size, lambda: lambda run: lambda: None)
        self._sampled = Sampled(torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.bool))
        self._previous: SampledTokens | None = None
        self._step = 0

    def prepare(self) -> PreparedStep:
        full = self._table.without_room()
        for sequence in full:
            sequence.pages.append(PageId(7))
        self._table.add_pages(full, [PageId(7)] * len(full))
        self._step += 1
        return prepare_step(StepPlan(self._table.launch(self._step), []), 16, 1000, ())

    def forward(self, step: PreparedStep) -> None:
        on = StepDevice(GPU, self._graphs.tables)
        forwarded = forward_step(step, self._graphs.forward, SINGLE_RANK, on, self._previous)
        assert forwarded.params is not None
        np.testing.assert_array_equal(forwarded.params.position_B.numpy(), step.sampling.rows.positions)
        self._previous = SampledTokens(step, self._sampled, {})


def _no_logits(batch: Batch, **_: Any) -> ForwardOutput:
    return ForwardOutput(torch.empty(len(batch.sampled_places), 8))


@pytest.mark.parametrize("context", [4096, 32768])
def test_a_steady_decode_step_sends_one_small_copy(copies: list[int], context: int) -> None:
    """Before, it sent 4 copies of 71,952 bytes together at 4096 tokens, and launched 5 more kernels before the graph
    (8 where the batch is padded)."""
    run = SteadyDecode(64, context)
    for _ in range(3):
        run.forward(run.prepare())
    step = run.prepare()
    copies.clear()
    with _Launches() as launches:
        run.forward(step)
    batch = 64 * (8 + 8 + 8 + 4 + 8 + 8) + 64 * 4 + 16  # tokens, positions, rows, contexts, slots; starts
    sampling, awaited = 64 * (4 + 4 + 8 + 4 + 8 + 8), 64 * (8 + 8)
    entries = 4 * (8 + 4)  # 4 of 64 sequences get a page
    assert copies == [batch + sampling + awaited + entries] == [6464]
    launches.names.remove("clone")  # of the copy's double
    assert launches.names == ["index_copy_", "index_select", "index_copy_", "_foreach_copy_"]
