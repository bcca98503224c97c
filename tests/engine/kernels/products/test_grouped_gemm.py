"""Compares the Triton kernel for the experts' products with plain torch; a row must not depend on its batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.kernels import layer_ops
from engine.kernels.backends import select_ops
from engine.kernels.layer_ops import TorchOps
from engine.kernels.triton.backend import TritonAttention, TritonOps
from engine.kernels.triton.products import grouped_gemm as kernel_file
from engine.kernels.triton.products.grouped_gemm import grouped_gemm
from engine.layers.linear import GroupedLinear, can_multiply
from engine.weights.quantized_weight import QuantizedWeight, quantize_weight
from penstock.errors import CheckpointError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# fp32: sums of up to 123 products in another order. bf16 and fp16: the result, of values up to about 40, is rounded
# once.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-3},
    torch.float16: {"rtol": 1e-3, "atol": 2e-3},
}


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)


def twin(x_RI: torch.Tensor, weight_EOI: torch.Tensor, start_E1: torch.Tensor, rows_X: torch.Tensor) -> torch.Tensor:
    products = [partial(F.linear, weight=weight_OI) for weight_OI in weight_EOI]
    return layer_ops.grouped_gemm(x_RI, products, start_E1, rows_X)


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
def test_odd_shapes_equal_the_reference(counts: list[int], width_in: int, width_out: int, dtype: torch.dtype) -> None:
    check(counts, width_in, width_out, dtype, tiles=(None, 64))


def check(
    counts: list[int], width_in: int, width_out: int, dtype: torch.dtype, tiles: tuple[int | None, ...] = (None,)
) -> None:
    """Compares rows that are gathered out of order, some of them for several places."""
    torch.manual_seed(sum(counts))
    x_RI = torch.randn(7, width_in, device=DEVICE).to(dtype)
    weight_EOI = torch.randn(len(counts), width_out, width_in, device=DEVICE).to(dtype)
    rows_X = torch.randint(7, (sum(counts),), device=DEVICE)
    expected = twin(x_RI.float(), weight_EOI.float(), starts_of(counts), rows_X)
    for tile_rows in tiles:
        out = grouped_gemm(x_RI, weight_EOI, starts_of(counts), rows_X, tile_rows=tile_rows)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])


def test_strided_rows_are_read_in_place() -> None:
    x_RI = torch.randn(9, 40, device=DEVICE)[:, 8:]
    weight_EOI = torch.randn(3, 40, 2 * 32, device=DEVICE)[:, ::2, 32:]
    start_E1, rows_X = starts_of([4, 0, 5]), torch.arange(9, device=DEVICE)
    expected = twin(x_RI, weight_EOI, start_E1, rows_X)
    torch.testing.assert_close(grouped_gemm(x_RI, weight_EOI, start_E1, None), expected, **TOLERANCE[torch.float32])


def test_no_rows_give_no_results() -> None:
    weight_EOI = torch.randn(2, 5, 4, device=DEVICE)
    x_RI, start_E1 = torch.empty(0, 4, device=DEVICE), starts_of([0, 0])
    assert grouped_gemm(x_RI, weight_EOI, start_E1, None).shape == (0, 5)
    assert twin(x_RI, weight_EOI, start_E1, torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 5)


def test_places_after_the_last_experts_are_not_written() -> None:
    """They are pairs of experts on other ranks."""
    torch.manual_seed(3)
    x_RI, weight_EOI = torch.randn(30, 40, device=DEVICE), torch.randn(3, 50, 40, device=DEVICE)
    rows_X = torch.arange(30, device=DEVICE).flip(0)
    for counts in ([4, 0, 17], [0, 0, 0]):
        num_own = sum(counts)
        out, expected = (run(x_RI, weight_EOI, starts_of(counts), rows_X) for run in (grouped_gemm, twin))
        assert out.shape == expected.shape == (30, 50)
        torch.testing.assert_close(out[:num_own], expected[:num_own], **TOLERANCE[torch.float32])
        assert bool(expected[num_own:].isnan().all())


@pytest.fixture
def uniform_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter's `tl.dot` compute every row of a tile with the same operations, as a GPU does.

    The interpreter calls `np.matmul`, and a BLAS may give rows of one tile to different micro-kernels: OpenBLAS on
    AVX-512 sums rows 0 to 5 of 16 in another order than rows 6 to 15. A row's result would then depend on its place in
    the tile, whatever the kernel does. Compiled kernels are left alone."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += np.multiply(a.data[:, k, None], b.data[None, k], dtype=total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("uniform_dot")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_shares_its_tiles(dtype: torch.dtype) -> None:
    """Compares a row alone, at any place among its expert's rows, and beside experts with and without rows, at one tile
    width. The kernel decides which rows a tile holds and in which order a row is summed, but that must not change
    the row's bits."""
    torch.manual_seed(5)
    weight_EOI = torch.randn(4, 70, 96, device=DEVICE).to(dtype)
    row = torch.randn(1, 96, device=DEVICE).to(dtype)
    alone = grouped_gemm(row, weight_EOI, starts_of([0, 0, 1, 0]), None, tile_rows=16)
    for counts, place in (([3, 0, 1, 2], 3), ([0, 9, 16, 0], 9 + 15), ([1, 1, 40, 1], 2 + 21)):
        x_XI = torch.randn(sum(counts), 96, device=DEVICE).to(dtype)
        x_XI[place] = row
        out = grouped_gemm(x_XI, weight_EOI, starts_of(counts), None, tile_rows=16)
        assert torch.equal(out[place], alone[0])


def test_wrong_tensors_are_refused() -> None:
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


def test_tiles_widen_with_the_rows_per_expert() -> None:
    assert [kernel_file._tile_rows(rows, 8) for rows in (1, 8 * 16, 8 * 17, 8 * 64, 8 * 5000)] == [16, 16, 32, 64, 128]


def test_packed_experts_multiply_like_plain_ones() -> None:
    weight_EOI = torch.randn(3, 20, 16)
    packed = GroupedLinear(3, lambda expert: weight_EOI[expert])
    x_XI, start_E1 = torch.randn(6, 16), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    expected = twin(x_XI, weight_EOI, start_E1, torch.arange(6))
    torch.testing.assert_close(layer_ops.grouped_gemm(x_XI, packed.experts, start_E1, None), expected)


def test_stacked_weights_use_the_kernel_and_packed_ones_the_reference() -> None:
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
    """Checks both products of a layer of Qwen3-30B-A3B."""
    check(counts, 2048, 1536, dtype)
    check(counts, 768, 2048, dtype)


def fp8_experts(num_experts: int, width_out: int, width_in: int, num_groups: int) -> list[QuantizedWeight]:
    """Returns random weights, each group of whose inputs has its own scale."""
    size = width_in // num_groups
    experts = []
    for _ in range(num_experts):
        parts = [quantize_weight(torch.randn(width_out, size) * 2**group, "fp8") for group in range(num_groups)]
        codes = torch.cat([part.codes_OI.view(torch.uint8) for part in parts], dim=1).view(torch.float8_e4m3fn)
        scales = torch.cat([part.scales_OG for part in parts], dim=1)
        experts.append(QuantizedWeight("fp8", codes.to(DEVICE), scales.to(DEVICE), None, size))
    return experts


def stacked(experts: list[QuantizedWeight]) -> GroupedLinear:
    """Returns the experts in the form that a GPU holds."""
    layer = object.__new__(GroupedLinear)
    layer._stack_codes(len(experts), experts.__getitem__, experts[0])
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width_in", "num_groups"), [(64, 1), (96, 1), (128, 2), (96, 3)])
def test_fp8_experts_stay_fp8_and_equal_the_dequantized_ones(
    width_in: int, num_groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(width_in)
    experts, counts = fp8_experts(4, 70, width_in, num_groups), [5, 0, 17, 1]
    layer = stacked(experts)
    assert layer.weight_EOI is not None
    assert layer.weight_EOI.dtype == torch.float8_e4m3fn
    x_RI, rows_X = torch.randn(7, width_in, device=DEVICE).to(dtype), torch.arange(23, device=DEVICE) % 7
    expected = twin(x_RI, torch.stack([expert.dequantize(dtype) for expert in experts]), starts_of(counts), rows_X)
    # Under the interpreter, casts to bf16 truncate by up to 1/128 of a value, and sums grow with the groups' scales.
    rtol, atol = (2e-2, 0.1 * 2**num_groups) if dtype == torch.bfloat16 else (4e-3, 2e-2)
    for ops in (TritonOps(), TorchOps()):
        out = ops.grouped_gemm(x_RI, layer, starts_of(counts), rows_X)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_a_gpu_keeps_experts_in_fp8_if_the_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(weight: QuantizedWeight) -> Any:
        names = ("kind", "codes_OI", "scales_OG", "zeros_OG", "group_size", "group_I", "shape")
        return SimpleNamespace(device=torch.device("cuda"), **{name: getattr(weight, name) for name in names})

    monkeypatch.setattr("engine.layers.linear.reads_e4m3", lambda device: True)
    (fp8,) = fp8_experts(1, 8, 128, 2)
    uneven = replace(fp8, group_size=96)
    int8 = quantize_weight(torch.randn(8, 128), "int8")
    assert can_multiply(on_gpu(fp8), torch.bfloat16, is_expert=True)
    assert not can_multiply(on_gpu(fp8), torch.float32, is_expert=True)
    assert not can_multiply(on_gpu(uneven), torch.bfloat16, is_expert=True)
    assert not can_multiply(on_gpu(int8), torch.bfloat16, is_expert=True)
    monkeypatch.setattr("engine.layers.linear.reads_e4m3", lambda device: False)
    assert not can_multiply(on_gpu(fp8), torch.bfloat16, is_expert=True), "an A100 dequantizes"


def test_unlike_experts_and_scales_of_another_shape_are_refused() -> None:
    experts = [*fp8_experts(1, 8, 64, 1), *fp8_experts(1, 8, 64, 2)]
    with pytest.raises(CheckpointError, match="expert 1 of a layer is not stored in fp8 with 1 scales a row"):
        stacked(experts)
    codes = torch.zeros(2, 8, 64, device=DEVICE).to(torch.float8_e4m3fn)
    x, start = torch.zeros(3, 64, dtype=torch.float16, device=DEVICE), starts_of([1, 2])
    with pytest.raises(ValueError, match=r"scales_EGO is torch.float32 \(2, 3, 8\); expected contiguous"):
        grouped_gemm(x, codes, start, None, scales_EGO=torch.zeros(2, 3, 8, device=DEVICE))
    with pytest.raises(ValueError, match=r"weight_EOI torch\.float8_e4m3fn"):
        grouped_gemm(x, codes, start, None)
