"""Multiplies rows that are grouped by expert with their expert's weight (Triton).

One launch serves all experts: a program multiplies a tile of one expert's rows with a tile of its weight. The start of
each expert's rows is read on the device, so the host launches as many programs as any distribution of the rows could
need, and programs without work end at once. Rows are gathered as they are read. Reference: `grouped_gemm` in
`engine.kernels.layer_ops`.

A row's sum runs over `I` in one order, whatever shares its tile. Tiles are wider where experts have many rows, and on
tensor cores the last bit may then differ, as in any matrix product.

fp8 weights are read as they are stored, at half of bf16's bytes, and multiplied by their scales in registers; a product
has the bits of one with the dequantized weight.

Shapes: `R` rows to read, `X` places, `E` experts, `I` in, `O` out, `G` groups of inputs that share a scale; a tile is
`M` rows by `N` outputs, `K` inputs deep.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index
from engine.kernels.triton.common import cdiv, dot_type, next_power_of_2

_WIDTHS = (16, 32, 64, 128)  # rows of a tile; 16 is the least that tensor cores take


def grouped_gemm(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    start_E1: torch.Tensor,
    rows_X: torch.Tensor | None,
    *,
    scales_EGO: torch.Tensor | None = None,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Multiplies places start[e] to start[e + 1] (int32) with `weight_EOI[e].T`; returns [X, O] in x's dtype, summed in
    fp32; places from start[E] on are not written.

    Place i is row `rows_X[i]` (int64) of `x_RI`, or row i. With `scales_EGO` (float32, contiguous) the weights are e4m3
    codes; the G groups of inputs are equal and multiples of 32. `tile_rows` is chosen from the rows per expert unless
    given.
    """
    num_experts, width_out, width_in = _check(x_RI, weight_EOI, start_E1, rows_X, scales_EGO)
    num_rows = x_RI.shape[0] if rows_X is None else rows_X.shape[0]
    out_XO = torch.empty((num_rows, width_out), dtype=x_RI.dtype, device=x_RI.device)
    if num_rows == 0:
        return out_XO
    tile_m = tile_rows or _tile_rows(num_rows, num_experts)
    # Each expert with rows has at most one tile that is not full.
    max_tiles = (num_rows + min(num_experts, num_rows) * (tile_m - 1)) // tile_m
    tile_n = 64 if tile_m == _WIDTHS[0] else 128
    group = 0 if scales_EGO is None else width_in // scales_EGO.shape[1]
    tile_k = 32 if x_RI.dtype == torch.float32 or group % 64 else 64
    _gemm_kernel[(max_tiles, cdiv(width_out, tile_n))](
        x_RI, weight_EOI, weight_EOI if scales_EGO is None else scales_EGO, start_E1,
        x_RI if rows_X is None else rows_X, out_XO,
        x_RI.stride(0), weight_EOI.stride(0), weight_EOI.stride(1), out_XO.stride(0),
        NUM_EXPERTS=num_experts, EXPERTS_PADDED=next_power_of_2(num_experts),
        WIDTH_IN=width_in, WIDTH_OUT=width_out, GROUP=group, GATHER=rows_X is not None,
        TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k,
        DOT_TYPE=dot_type(x_RI.dtype), num_warps=8 if tile_m == _WIDTHS[-1] else 4, num_stages=3,
    )  # fmt: skip
    return out_XO


def _tile_rows(num_rows: int, num_experts: int) -> int:
    """Returns the narrowest tile that holds an expert's average number of rows."""
    mean = num_rows // num_experts
    return next((width for width in _WIDTHS if width >= mean), _WIDTHS[-1])


def _check(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    start_E1: torch.Tensor,
    rows_X: torch.Tensor | None,
    scales_EGO: torch.Tensor | None,
) -> tuple[int, int, int]:
    if weight_EOI.dim() != 3 or x_RI.dim() != 2 or x_RI.shape[1] != weight_EOI.shape[2]:
        raise ValueError(
            f"grouped_gemm: x_RI has shape {tuple(x_RI.shape)}, weight_EOI {tuple(weight_EOI.shape)}; expected [R, I] "
            "and [E, O, I]"
        )
    for name, tensor in (("x_RI", x_RI), ("weight_EOI", weight_EOI)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"grouped_gemm: {name} has strides {tensor.stride()}; the last must be 1")
    wanted = x_RI.dtype if scales_EGO is None else torch.float8_e4m3fn
    if weight_EOI.dtype != wanted or x_RI.device != weight_EOI.device:
        raise ValueError(
            f"grouped_gemm: x_RI is {x_RI.dtype} on {x_RI.device}, weight_EOI {weight_EOI.dtype} on {weight_EOI.device}"
        )
    num_experts, width_out, width_in = weight_EOI.shape
    if scales_EGO is not None:
        num_groups = scales_EGO.shape[1] if scales_EGO.dim() == 3 else 0
        like = (torch.float32, (num_experts, num_groups, width_out), True)
        if (scales_EGO.dtype, scales_EGO.shape, scales_EGO.is_contiguous()) != like or width_in % (32 * num_groups):
            raise ValueError(
                f"grouped_gemm: scales_EGO is {scales_EGO.dtype} {tuple(scales_EGO.shape)}; expected contiguous "
                f"torch.float32 [{num_experts}, G, {width_out}], with groups of {width_in} / G, a multiple of 32"
            )
    check_index("grouped_gemm", "start_E1", start_E1, torch.int32, (num_experts + 1,))
    if rows_X is not None:
        check_index("grouped_gemm", "rows_X", rows_X, torch.int64, (-1,))
    return num_experts, width_out, width_in


@triton.jit
def _gemm_kernel(
    x_ptr,  # [R, I], last stride 1
    weight_ptr,  # [E, O, I], last stride 1; e4m3 with GROUP
    scales_ptr,  # fp32 [E, G, O], contiguous; read only with GROUP
    start_ptr,  # int32 [E + 1]
    rows_ptr,  # int64 [X]; read only with GATHER
    out_ptr,  # [X, O], last stride 1
    x_stride_r,
    weight_stride_e,
    weight_stride_o,
    out_stride_x,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    WIDTH_IN: tl.constexpr,
    WIDTH_OUT: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of TILE_K; 0 for plain weights
    GATHER: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):  # grid: (tiles of rows at most, tiles of outputs)
    tile = tl.program_id(0)
    expert_E = tl.arange(0, EXPERTS_PADDED)
    real_E = expert_E < NUM_EXPERTS
    begin_E = tl.load(start_ptr + expert_E, mask=real_E, other=0)
    count_E = tl.load(start_ptr + expert_E + 1, mask=real_E, other=0) - begin_E
    tiles_E = (count_E + TILE_M - 1) // TILE_M
    end_E = tl.cumsum(tiles_E, 0)  # tiles of this expert and those before it
    expert = tl.sum((end_E <= tile).to(tl.int32), 0)
    if expert >= NUM_EXPERTS:
        return
    mine_E = expert_E == expert
    first_tile = tl.sum(tl.where(mine_E, end_E - tiles_E, 0), 0)
    end = tl.load(start_ptr + expert + 1)
    place_M = tl.load(start_ptr + expert) + (tile - first_tile) * TILE_M + tl.arange(0, TILE_M)
    out_N = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    real_M, real_N = place_M < end, out_N < WIDTH_OUT
    row_M = tl.load(rows_ptr + place_M, mask=real_M, other=0) if GATHER else place_M.to(tl.int64)
    weight_of_expert = weight_ptr + expert.to(tl.int64) * weight_stride_e
    sum_MN = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, WIDTH_IN, TILE_K):
        in_K = start + tl.arange(0, TILE_K)
        real_K = in_K < WIDTH_IN
        x_MK = tl.load(
            x_ptr + row_M[:, None] * x_stride_r + in_K[None, :], mask=real_M[:, None] & real_K[None, :], other=0.0
        ).to(DOT_TYPE)
        weight_KN = tl.load(
            weight_of_expert + out_N[None, :].to(tl.int64) * weight_stride_o + in_K[:, None],
            mask=real_K[:, None] & real_N[None, :],
            other=0.0,
        )
        if GROUP:
            scale_at = (expert.to(tl.int64) * (WIDTH_IN // GROUP) + start // GROUP) * WIDTH_OUT
            scale_N = tl.load(scales_ptr + scale_at + out_N, mask=real_N, other=0.0)
            weight_KN = (weight_KN.to(tl.float32) * scale_N[None, :]).to(x_ptr.dtype.element_ty)
        weight_KN = weight_KN.to(DOT_TYPE)
        sum_MN += tl.dot(x_MK, weight_KN, input_precision="ieee")
    out_ptr_MN = out_ptr + place_M[:, None].to(tl.int64) * out_stride_x + out_N[None, :]
    tl.store(out_ptr_MN, sum_MN.to(out_ptr.dtype.element_ty), mask=real_M[:, None] & real_N[None, :])
