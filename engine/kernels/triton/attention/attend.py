"""Runs the loop that attention kernels share: rows of queries over a range of one KV head's pages (Triton).

Softmax is computed online (Dao 2023, "FlashAttention-2"): each tile of the context is read once, and earlier sums are
scaled down when a larger score comes. `paged_decode` and `paged_prefill` choose the rows and the range.

Shapes: `R` rows (a query of one head each), `C` context tokens of a tile, `H` head dim.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exponentials are powers of 2
# Weights times scales of values are rounded to fp16, which has few bits for numbers below 6e-5, as they often are, so
# they are multiplied by this first. Then values up to 32,000 do not overflow in int8 (up to 114,000 in fp8).
LIFT: tl.constexpr = tl.constexpr(256.0)


@dataclass(frozen=True, slots=True)
class Scores:
    """Turns a product of query and key into the exponent of a power of 2: `factor` times the product or, with a cap,
    `cap` times the tanh of that."""

    factor: float
    cap: float

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> Scores:
        return cls(scale * LOG2_E, 0.0) if softcap is None else cls(scale / softcap, softcap * LOG2_E)


@triton.jit
def begin_with_sinks(sink_ptr_R, is_row_R, split, max_R, sum_R):
    """Returns the largest score and the sum of weights with each row's sink, which only the first split counts."""
    sink_R = tl.load(sink_ptr_R, mask=is_row_R, other=float("-inf")).to(tl.float32) * 1.4426950408889634  # log2
    return tl.where(split == 0, sink_R, max_R), tl.where(split == 0, sum_R + 1.0, sum_R)


@triton.jit
def attend(
    q_RH,  # in DOT_TYPE
    position_R,  # of each row's query in its sequence; read only with SEEN == 2
    max_R,  # fp32, largest score so far, log2
    sum_R,  # fp32, of weights so far
    o_RH,  # fp32, of weighted values so far; with HAS_SCALES `LIFT` times as large
    begin,  # first token of the range
    end,  # the token after the last; with SEEN == 0 a whole number of tiles away
    table_ptr,  # int32, the sequence's row of the page table
    k_ptr,  # the KV head's keys in page 0
    v_ptr,
    k_scale_ptr,  # fp32, the KV head's scales of keys in page 0; read only with HAS_SCALES
    v_scale_ptr,
    pool_stride_p,
    pool_stride_s,
    scales_stride_p,
    factor,  # see `Scores`
    cap,
    window,  # tokens that a query sees, itself included; 0: all; read only with SEEN == 2
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SEEN: tl.constexpr,  # tokens that rows see: 0 all, 1 those before `end`, 2 those up to the row's position
):
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    tile_C = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        token_C = start + tile_C
        seen_C = token_C < end
        if SEEN == 0:
            page_C = tl.load(table_ptr + token_C // PAGE_SIZE)
        else:
            page_C = tl.load(table_ptr + token_C // PAGE_SIZE, mask=seen_C, other=0)
        place_C = page_C.to(tl.int64) * pool_stride_p + (token_C % PAGE_SIZE) * pool_stride_s
        place_CH = place_C[:, None] + dim_H[None, :]
        k_CH = _load(k_ptr + place_CH, seen_C, dim_H, HEAD_DIM, HEAD_DIM_PADDED, SEEN).to(DOT_TYPE)
        score_RC = tl.dot(q_RH, tl.trans(k_CH), input_precision="ieee") * factor
        if HAS_SCALES:
            scales_C = page_C.to(tl.int64) * scales_stride_p + token_C % PAGE_SIZE
            score_RC *= tl.load(k_scale_ptr + scales_C, mask=seen_C, other=0.0)[None, :]
        if HAS_CAP:
            shrunk_RC = tl.exp2(tl.abs(score_RC) * -2.8853900817779268)  # exp(-2 |x|)
            tanh_RC = (1.0 - shrunk_RC) / (1.0 + shrunk_RC)
            score_RC = tl.where(score_RC < 0, -tanh_RC, tanh_RC) * cap
        if SEEN == 1:
            score_RC = tl.where(seen_C[None, :], score_RC, float("-inf"))
        if SEEN == 2:
            distance_RC = position_R[:, None] - token_C[None, :]
            visible_RC = (distance_RC >= 0) & seen_C[None, :] & ((window == 0) | (distance_RC < window))
            score_RC = tl.where(visible_RC, score_RC, float("-inf"))
        new_max_R = tl.maximum(max_R, tl.max(score_RC, 1))
        base_R = new_max_R
        if SEEN == 2:  # a row may have seen no token yet
            base_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
        weight_RC = tl.exp2(score_RC - base_R[:, None])
        shrink_R = tl.exp2(max_R - base_R)
        sum_R = sum_R * shrink_R + tl.sum(weight_RC, 1)
        max_R = new_max_R
        if HAS_SCALES:
            weight_RC *= (tl.load(v_scale_ptr + scales_C, mask=seen_C, other=0.0) * LIFT)[None, :]
        # Unwritten slots may hold NaN, and NaN x 0 is NaN: V is masked like K.
        v_CH = _load(v_ptr + place_CH, seen_C, dim_H, HEAD_DIM, HEAD_DIM_PADDED, SEEN).to(DOT_TYPE)
        o_RH = tl.dot(weight_RC.to(DOT_TYPE), v_CH, o_RH * shrink_R[:, None], input_precision="ieee")
    return max_R, sum_R, o_RH


@triton.jit
def _load(
    ptr_CH, seen_C, dim_H, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, SEEN: tl.constexpr
):  # without a mask if none is needed
    if SEEN == 0 and HEAD_DIM == HEAD_DIM_PADDED:
        return tl.load(ptr_CH)
    elif HEAD_DIM == HEAD_DIM_PADDED:
        return tl.load(ptr_CH, mask=seen_C[:, None], other=0.0)
    elif SEEN == 0:
        return tl.load(ptr_CH, mask=(dim_H < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptr_CH, mask=seen_C[:, None] & (dim_H < HEAD_DIM)[None, :], other=0.0)
