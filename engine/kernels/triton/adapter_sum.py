"""Adds adapters to the rows of a product, each row with the matrices of its slot (Triton).

Two launches serve all slots: the rows, sorted by slot, are multiplied with A by the experts' grouped GEMM, and this
kernel multiplies the results with B and adds them to the product's rows where those are. The start of each slot's rows
is read on the device, so a captured step serves any mixture; programs of slot 0 end at once. Reference: `add_adapters`
in `engine.kernels.adapter_weights`. The inner results are rounded to the product's dtype, as PEFT does.

Shapes: `T` rows, `S` slots, `R` rank of a slot, `Q` = parts * R, `I` in, `O` out; a tile is `M` rows by `N` outputs.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.checks import check_index
from engine.kernels.triton.common import cdiv, dot_type, next_power_of_2
from engine.kernels.triton.products.grouped_gemm import grouped_gemm

_TILE_M, _TILE_N = 16, 64  # 16 rows are the least that tensor cores take; most slots have one
_MIN_DEPTH = 16


def add_adapters(y_TO: torch.Tensor, x_TI: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Adds `(x A^T) B^T` to `y_TO`, in place. `rows` must be sorted by slot. Never waits for the device."""
    if rows.order_T is None or rows.start_S1 is None:
        raise ValueError("add_adapters: the rows are not sorted by slot; make them by AdapterRows.by_slot")
    up_SRO = weights.up_SRO
    num_slots, rank, num_outputs = up_SRO.shape
    num_rows = y_TO.shape[0]
    if y_TO.dim() != 2 or y_TO.shape[1] != num_outputs or y_TO.stride(1) != 1 or y_TO.dtype != up_SRO.dtype:
        raise ValueError(
            f"add_adapters: y_TO is {y_TO.dtype} {tuple(y_TO.shape)}, strides {y_TO.stride()}; expected "
            f"{up_SRO.dtype} [T, {num_outputs}], the last dimension dense"
        )
    check_index("add_adapters", "order_T", rows.order_T, torch.int64, (num_rows,))
    if num_rows == 0:
        return
    inner_TQ = grouped_gemm(x_TI, weights.down_SQI, rows.start_S1, rows.order_T)
    max_tiles = (num_rows + min(num_slots, num_rows) * (_TILE_M - 1)) // _TILE_M
    begin = 0
    for part, end in enumerate(weights.part_ends):
        _expand_kernel[(max_tiles, cdiv(end - begin, _TILE_N))](
            inner_TQ, up_SRO, rows.start_S1, rows.order_T, y_TO,
            inner_TQ.stride(0), up_SRO.stride(0), up_SRO.stride(1), y_TO.stride(0),
            FIRST_INNER=part * rank, BEGIN=begin, END=end, RANK=rank,
            DEPTH=max(_MIN_DEPTH, next_power_of_2(rank)),
            NUM_SLOTS=num_slots, SLOTS_PADDED=next_power_of_2(num_slots),
            TILE_M=_TILE_M, TILE_N=_TILE_N, DOT_TYPE=dot_type(y_TO.dtype), num_warps=4,
        )  # fmt: skip
        begin = end


@triton.jit
def _expand_kernel(
    inner_ptr,  # [T, Q] by slot, last stride 1
    up_ptr,  # [S, R, O], last stride 1
    start_ptr,  # int32 [S + 1]
    order_ptr,  # int64 [T], the row of y of each row of inner
    y_ptr,  # [T, O], last stride 1
    inner_stride_t,
    up_stride_s,
    up_stride_r,
    y_stride_t,
    FIRST_INNER: tl.constexpr,
    BEGIN: tl.constexpr,  # outputs of the part
    END: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):  # grid: (tiles of rows at most, tiles of outputs)
    tile = tl.program_id(0)
    slot_S = tl.arange(0, SLOTS_PADDED)
    real_S = slot_S < NUM_SLOTS
    begin_S = tl.load(start_ptr + slot_S, mask=real_S, other=0)
    count_S = tl.load(start_ptr + slot_S + 1, mask=real_S, other=0) - begin_S
    tiles_S = (count_S + TILE_M - 1) // TILE_M
    end_S = tl.cumsum(tiles_S, 0)  # tiles of this slot and those before it
    slot = tl.sum((end_S <= tile).to(tl.int32), 0)
    if slot == 0 or slot >= NUM_SLOTS:
        return
    first_tile = tl.sum(tl.where(slot_S == slot, end_S - tiles_S, 0), 0)
    place_M = tl.load(start_ptr + slot) + (tile - first_tile) * TILE_M + tl.arange(0, TILE_M)
    real_M = place_M < tl.load(start_ptr + slot + 1)
    out_N = BEGIN + tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inner_K = tl.arange(0, DEPTH)
    real_K, real_N = inner_K < RANK, out_N < END
    inner_MK = tl.load(
        inner_ptr + place_M[:, None].to(tl.int64) * inner_stride_t + FIRST_INNER + inner_K[None, :],
        mask=real_M[:, None] & real_K[None, :],
        other=0.0,
    ).to(DOT_TYPE)
    up_KN = tl.load(
        up_ptr + slot.to(tl.int64) * up_stride_s + inner_K[:, None] * up_stride_r + out_N[None, :],
        mask=real_K[:, None] & real_N[None, :],
        other=0.0,
    ).to(DOT_TYPE)
    row_M = tl.load(order_ptr + place_M, mask=real_M, other=0)
    y_MN = y_ptr + row_M[:, None] * y_stride_t + out_N[None, :]
    real_MN = real_M[:, None] & real_N[None, :]
    total_MN = tl.load(y_MN, mask=real_MN, other=0.0).to(tl.float32)
    total_MN += tl.dot(inner_MK, up_KN, input_precision="ieee")
    tl.store(y_MN, total_MN.to(y_ptr.dtype.element_ty), mask=real_MN)
