"""Quantizes the rows of a product to fp8, each by its own largest value (Triton).

One kernel over rows that stay in cache replaces ten torch operations. Reference, bit for bit: `quantize` in
`engine.kernels.kv_quantization`.

Shapes: `T` rows, `I` values of a row.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.kv_quantization import LARGEST, SMALLEST_PEAK
from engine.kernels.triton.common import next_power_of_2
from engine.kernels.triton.write_kv import to_e4m3

_BLOCK = 4096


def quantize_rows(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, float8_e4m3fn [T, I], and scales, float32 [T]. `x_TI` has last stride 1. The scale of a row with
    values that are not finite is not finite."""
    if x_TI.dim() != 2 or x_TI.stride(1) != 1:
        raise ValueError(
            f"quantize_rows: x_TI has shape {tuple(x_TI.shape)}, strides {x_TI.stride()}; expected [T, I], the last "
            "dense"
        )
    num_rows, width = x_TI.shape
    codes_TI = torch.empty((num_rows, width), dtype=torch.uint8, device=x_TI.device)
    scales_T = torch.empty(num_rows, dtype=torch.float32, device=x_TI.device)
    if num_rows:
        block = min(_BLOCK, next_power_of_2(width))
        _rows_kernel[(num_rows,)](
            x_TI, codes_TI, scales_T, x_TI.stride(0), WIDTH=width, BLOCK=block,
            LARGEST=LARGEST[torch.float8_e4m3fn], SMALLEST_PEAK=SMALLEST_PEAK, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
    return codes_TI.view(torch.float8_e4m3fn), scales_T


@triton.jit
def _rows_kernel(
    x_ptr,  # [T, I], last stride 1
    codes_ptr,  # e4m3 as uint8 [T, I], contiguous
    scales_ptr,  # fp32 [T]
    x_stride_t,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
):  # grid: (T,)
    row = tl.program_id(0).to(tl.int64)
    place_I = tl.arange(0, BLOCK)
    peak_I = tl.zeros([BLOCK], tl.float32)
    nan_I = tl.zeros([BLOCK], tl.int32)
    for start in range(0, WIDTH, BLOCK):
        mask_I = start + place_I < WIDTH
        x_I = tl.load(x_ptr + row * x_stride_t + start + place_I, mask=mask_I, other=0.0).to(tl.float32)
        peak_I = tl.maximum(peak_I, tl.abs(x_I))
        nan_I += (x_I != x_I).to(tl.int32)  # a maximum does not propagate NaN
    peak_1 = tl.full([1], 0.0, tl.float32) + tl.max(peak_I, 0)
    peak_1 = tl.where(peak_1 < SMALLEST_PEAK, 0.0, peak_1)
    largest_1 = tl.full([1], LARGEST, tl.float32)
    factor_1 = tl.where(peak_1 > 0, tl.div_rn(largest_1, tl.where(peak_1 > 0, peak_1, 1.0)), 0.0)
    scale_1 = tl.where(tl.sum(nan_I, 0) > 0, float("nan"), tl.div_rn(peak_1, largest_1))
    tl.store(scales_ptr + row + tl.arange(0, 1), scale_1)
    for start in range(0, WIDTH, BLOCK):
        mask_I = start + place_I < WIDTH
        x_I = tl.load(x_ptr + row * x_stride_t + start + place_I, mask=mask_I, other=0.0).to(tl.float32)
        scaled_I = tl.minimum(tl.maximum(x_I * factor_1, -LARGEST), LARGEST)
        tl.store(codes_ptr + row * WIDTH + start + place_I, to_e4m3(scaled_I), mask=mask_I)
