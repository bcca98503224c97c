"""Tests that a step's arrays reach a GPU unchanged in a single copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.upload import upload_all
from engine.sampling.row_params import SamplingTensors
from engine.step.batch import build_host_batch, to_device
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
