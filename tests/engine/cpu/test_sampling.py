"""Compares the CPU kernel that samples rows with the same arithmetic in torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cpu.library import NativeKernels, load_native
from engine.cpu.sampling import sample_tokens
from engine.sampling.distribution import pad_scores, sample_scores
from engine.sampling.row_params import SamplingRows
from engine.step.plan import sampling_records
from penstock.types import SamplingParams
from tests.support.engine.isas import needs_native

pytestmark = [needs_native, pytest.mark.usefixtures("isa")]
FILTERS = (
    {},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"top_k": 20, "top_p": 0.5},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.2, "top_p": 0.999},
    {"temperature": 3.0, "top_p": 0.7},
)


def kernels() -> NativeKernels:
    found = load_native()
    assert found is not None
    return found


def rows_of(*settings: dict[str, float]) -> SamplingRows:
    params = [
        SamplingParams(max_tokens=1, **{"temperature": 0.9, "seed": 7 * place, **setting})  # type: ignore[arg-type]
        for place, setting in enumerate(settings)
    ]
    return SamplingRows(sampling_records(params), np.arange(len(params)) * 13)


def any_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 128, 1000, 5003])
def test_tokens_equal_the_references(dtype: torch.dtype, vocab_size: int) -> None:
    rows = rows_of(*FILTERS * 12)
    logits_RV = any_logits(len(rows), vocab_size).to(dtype)
    before = logits_RV.clone()
    token_ids_R, valid_R = sample_tokens(kernels(), logits_RV, rows.records, rows.positions)
    expected_R, totals_R = sample_scores(pad_scores(logits_RV), rows, vocab_size)
    assert torch.equal(token_ids_R, expected_R)
    assert valid_R.all()
    assert torch.isfinite(totals_R).all()
    assert torch.equal(logits_RV, before)


def test_greedy_rows_take_the_first_likeliest_token_beside_random_ones() -> None:
    settings = [{"temperature": 0.0} if row % 2 else {"top_p": 0.8} for row in range(30)]
    rows, logits_RV = rows_of(*settings), any_logits(30, 300)
    logits_RV[:, 200:] = logits_RV[:, :100]
    token_ids_R, valid_R = sample_tokens(kernels(), logits_RV, rows.records, rows.positions)
    assert valid_R.all()
    assert torch.equal(token_ids_R[1::2], torch.from_numpy(logits_RV.numpy().argmax(-1))[1::2])
    for row in range(30):  # a row depends only on itself
        alone_row = slice(row, row + 1)
        alone = sample_tokens(kernels(), logits_RV[alone_row], rows.records[alone_row], rows.positions[alone_row])
        assert int(alone[0]) == int(token_ids_R[row])


@pytest.mark.parametrize("vocab_size", [40, 1000, 1024])
def test_masked_tokens_count_as_minus_infinity(vocab_size: int) -> None:
    rows = rows_of(*({"temperature": 0.0}, *FILTERS) * 4)
    logits_RV, random = any_logits(len(rows), vocab_size), np.random.default_rng(1)
    is_allowed_GV = random.random((3, -(-vocab_size // 32) * 32)) < np.array([[0.05], [0.5], [0.98]])
    is_allowed_GV[:, vocab_size // 2] = True
    words_GW = np.packbits(is_allowed_GV, axis=1, bitorder="little").view(np.int32)
    mask_of_row = random.integers(-1, 3, len(rows)).tolist()
    found = sample_tokens(kernels(), logits_RV, rows.records, rows.positions, words_GW, mask_of_row)
    masked_RV = logits_RV.clone()
    for row, mask in enumerate(mask_of_row):
        if mask >= 0:
            masked_RV[row][~torch.from_numpy(is_allowed_GV[mask, :vocab_size])] = float("-inf")
    expected = sample_tokens(kernels(), masked_RV, rows.records, rows.positions)
    assert torch.equal(found[0], expected[0])
    assert found[1].all()
    assert torch.isfinite(masked_RV[torch.arange(len(rows)), found[0]]).all()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_without_a_distribution_is_invalid_and_changes_no_other(
    sampling: dict[str, float], bad: float | None
) -> None:
    rows, logits_RV = rows_of(sampling, sampling, sampling), any_logits(3, 77)
    expected_R, _ = sample_tokens(kernels(), logits_RV, rows.records, rows.positions)
    if bad is None:
        logits_RV[1] = float("-inf")
    else:
        logits_RV[1, 70] = bad
    token_ids_R, valid_R = sample_tokens(kernels(), logits_RV, rows.records, rows.positions)
    assert valid_R.tolist() == [True, False, True]
    assert token_ids_R.tolist() == [int(expected_R[0]), 0, int(expected_R[2])]
