"""The experts' products: Triton's kernel against its plain-torch twin, and what shares a batch with a row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import grouped_gemm as kernel_file
from engine.kernels import reference, select_ops
from engine.kernels.grouped_gemm import grouped_gemm
from engine.kernels.triton_backend import TritonAttention, TritonOps
from engine.layers.linear import GroupedLinear
from engine.layers.ops import TorchOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# fp32: sums of up to 123 products in another order. bf16 and fp16: the result is rounded once, of values to about 40.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-3},
    torch.float16: {"rtol": 1e-3, "atol": 2e-3},
}


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)


def twin(x_RI: torch.Tensor, weight_EOI: torch.Tensor, start_E1: torch.Tensor, rows_X: torch.Tensor) -> torch.Tensor:
    products = [partial(F.linear, weight=weight_OI) for weight_OI in weight_EOI]
    return reference.grouped_gemm(x_RI, products, start_E1, rows_X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("counts", "width_in", "width_out"),
    [
        ([5], 123, 123),
        ([0, 1, 0, 17, 16, 0], 33, 70),
        ([40, 3, 0, 1, 129, 0, 15], 64, 130),
        ([0, 0, 1], 1, 1),
        ([1] * 11, 17, 129),
    ],
)
def test_odd_shapes_equal_the_twin(counts: list[int], width_in: int, width_out: int, dtype: torch.dtype) -> None:
    check(counts, width_in, width_out, dtype, tiles=(None, 64))


def check(
    counts: list[int], width_in: int, width_out: int, dtype: torch.dtype, tiles: tuple[int | None, ...] = (None,)
) -> None:
    """Rows gathered out of order, some of them by several places."""
    torch.manual_seed(sum(counts))
    x_RI = torch.randn(7, width_in, device=DEVICE).to(dtype)
    weight_EOI = torch.randn(len(counts), width_out, width_in, device=DEVICE).to(dtype)
    rows_X = torch.randint(7, (sum(counts),), device=DEVICE)
    expected = twin(x_RI.float(), weight_EOI.float(), starts_of(counts), rows_X)
    for tile_rows in tiles:
        out = grouped_gemm(x_RI, weight_EOI, starts_of(counts), rows_X, tile_rows=tile_rows)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])


def test_strided_rows_are_read_where_they_stand() -> None:
    x_RI = torch.randn(9, 40, device=DEVICE)[:, 8:]
    weight_EOI = torch.randn(3, 40, 2 * 32, device=DEVICE)[:, ::2, 32:]
    start_E1, rows_X = starts_of([4, 0, 5]), torch.arange(9, device=DEVICE)
    expected = twin(x_RI, weight_EOI, start_E1, rows_X)
    torch.testing.assert_close(grouped_gemm(x_RI, weight_EOI, start_E1, None), expected, **TOLERANCE[torch.float32])


def test_no_rows_give_no_rows() -> None:
    weight_EOI = torch.randn(2, 5, 4, device=DEVICE)
    x_RI, start_E1 = torch.empty(0, 4, device=DEVICE), starts_of([0, 0])
    assert grouped_gemm(x_RI, weight_EOI, start_E1, None).shape == (0, 5)
    assert twin(x_RI, weight_EOI, start_E1, torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_whoever_shares_its_tiles(dtype: torch.dtype) -> None:
    """In one width of tile: alone, at any place of its expert's rows, and beside experts with and without rows."""
    torch.manual_seed(5)
    weight_EOI = torch.randn(4, 70, 96, device=DEVICE).to(dtype)
    row = torch.randn(1, 96, device=DEVICE).to(dtype)
    alone = grouped_gemm(row, weight_EOI, starts_of([0, 0, 1, 0]), None, tile_rows=16)
    for counts, place in (([3, 0, 1, 2], 3), ([0, 9, 16, 0], 9 + 15), ([1, 1, 40, 1], 2 + 21)):
        x_XI = torch.randn(sum(counts), 96, device=DEVICE).to(dtype)
        x_XI[place] = row
        out = grouped_gemm(x_XI, weight_EOI, starts_of(counts), None, tile_rows=16)
        assert torch.equal(out[place], alone[0])


def test_wrong_tensors_are_refused_by_name() -> None:
    x, weight, start = torch.randn(3, 8), torch.randn(2, 5, 8), torch.tensor([0, 1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x_RI has shape \(3, 7\), weight_EOI \(2, 5, 8\); expected \[R, I\]"):
        grouped_gemm(x[:, :7], weight, start, None)
    with pytest.raises(ValueError, match=r"x_RI is torch.float16 on cpu, weight_EOI torch.float32"):
        grouped_gemm(x.half(), weight, start, None)
    with pytest.raises(ValueError, match=r"weight_EOI has strides .*the last must be 1"):
        grouped_gemm(torch.randn(3, 5), weight.transpose(1, 2), start, None)
    with pytest.raises(ValueError, match=r"start_E1 has shape \(2,\); expected \(3,\)"):
        grouped_gemm(x, weight, start[:2], None)
    with pytest.raises(ValueError, match=r"rows_X is torch.int32 .*expected torch.int64"):
        grouped_gemm(x, weight, start, torch.zeros(3, dtype=torch.int32))


def test_tiles_are_as_wide_as_experts_have_rows() -> None:
    assert [kernel_file._tile_rows(rows, 8) for rows in (1, 8 * 16, 8 * 17, 8 * 64, 8 * 5000)] == [16, 16, 32, 64, 128]


def test_packed_experts_multiply_as_the_plain_ones() -> None:
    weight_EOI = torch.randn(3, 20, 16)
    packed = GroupedLinear(3, lambda expert: weight_EOI[expert])
    x_XI, start_E1 = torch.randn(6, 16), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    expected = twin(x_XI, weight_EOI, start_E1, torch.arange(6))
    torch.testing.assert_close(reference.grouped_gemm(x_XI, packed.experts, start_E1, None), expected)


def test_layers_call_the_kernel_with_stacked_weights_and_the_twin_with_packed_ones() -> None:
    weight_EOI = torch.randn(3, 20, 16, device=DEVICE)
    weight = GroupedLinear(3, lambda expert: weight_EOI[expert])
    x_RI, start_E1, rows_X = torch.randn(4, 16, device=DEVICE), starts_of([2, 0, 4]), torch.arange(6, device=DEVICE) % 4
    expected = TorchOps().grouped_gemm(x_RI, weight, start_E1, rows_X)
    for stacked in (None, weight_EOI):
        weight.weight_EOI = stacked
        out = TritonOps().grouped_gemm(x_RI, weight, start_E1, rows_X)
        torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])
    assert isinstance(select_ops(TritonAttention()), TritonOps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[1, 0, 3, 0, 0, 1, 1, 2], [700, 0, 1, 64, 513, 128, 40, 9]])
def test_large_shapes_on_a_gpu(counts: list[int], dtype: torch.dtype) -> None:
    """A layer of Qwen3-30B-A3B, both of its products."""
    check(counts, 2048, 1536, dtype)
    check(counts, 768, 2048, dtype)
