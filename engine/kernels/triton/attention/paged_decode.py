"""Attention of one new token per sequence over its pages (Triton).

A program takes one work item after the other: a range of one sequence's context for one KV head, with all query heads
that share it, so that K and V are read from memory once. `engine.kernels.triton.attention.decode_plan` lists the items
on the device. There are always as many programs as the device holds, so a CUDA graph captured with a bound serves all
shorter contexts. A sequence of one item is written directly; the others leave partial results, which a second kernel
joins by log-sum-exp (Dao et al. 2023, "Flash-Decoding for long-context inference"). Reference:
`engine.kernels.reference`.

Shapes: `B` sequences, `N` query heads, `K` KV heads, `G` = N / K, `H` head dim, `P` pages, `S` page size, `W` items,
`X` items of a sequence, `C` context tokens of a tile.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index, check_queries, check_sinks
from engine.kernels.triton.attention.attend import LIFT, Scores, attend, begin_with_sinks
from engine.kernels.triton.attention.decode_plan import DecodePlan, plan_decodes
from engine.kernels.triton.attention.join_splits import PER_STEP, num_resident
from engine.kernels.triton.attention.tuning import KernelConfig, select_config
from engine.kernels.triton.common import dot_type, next_power_of_2

_TILE_BYTES = 16384  # of K, and the same of V
# A stage looks up pages, the next reads their tokens, the next uses them: with five stages each program has two tiles
# of K and V on its multiprocessor, and three programs fit.
_STAGES = 5
_JOINED = 16  # items that the second kernel joins at once


def paged_decode(
    q_BNH: torch.Tensor,
    pool_layer: torch.Tensor,
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    o_BNH: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_context_len: int,
    softcap: float | None = None,
    scales: torch.Tensor | None = None,
    sinks_N: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Writes attention of each sequence's last token into `o_BNH`. Computes in fp32, whatever the dtype.

    `page_table_BP` and `context_lens_B` are int32; a sequence of context 0 (padding of a batch) gets zeros. `window`
    counts the query itself; `max_context_len` is a bound. An 8-bit pool has `scales`, fp32 [P, 2, K, S]. `plan` is
    that of these lengths and this window, made here by default; `config` is by default chosen by
    `engine.kernels.triton.attention.tuning`. The sums of a sequence do not depend on the other sequences.
    """
    num_sequences, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = pool_layer.shape[2:4]
    check_sinks("paged_decode", sinks_N, num_heads)
    check_queries("paged_decode", q_BNH, o_BNH, pool_layer, scales)
    check_index("paged_decode", "page_table_BP", page_table_BP, torch.int32, (num_sequences, -1))
    check_index("paged_decode", "context_lens_B", context_lens_B, torch.int32, (num_sequences,))
    if num_sequences == 0:
        return
    groups = num_heads // num_kv_heads
    config = config or _select(q_BNH, pool_layer, groups)
    padded = max(16, next_power_of_2(head_dim))
    plan = plan or plan_decodes(context_lens_B, window)
    tile_bytes = 2 * ((config.num_stages - 1) // 2) * config.tile * padded * pool_layer.element_size()
    reach = max_context_len if window is None else min(window, max_context_len)
    splits = reach > plan.split_tokens
    num_items = plan.max_items if splits else num_sequences  # at most
    programs = min(max(1, num_resident(tile_bytes, q_BNH.device) // num_kv_heads), num_items)
    partial_WNH = q_BNH.new_empty((num_items, num_heads, head_dim) if splits else 0, dtype=torch.float32)
    lse_WN = q_BNH.new_empty((num_items, num_heads) if splits else 0, dtype=torch.float32)
    scores = Scores.of(scale, softcap)
    _decode_kernel[(num_kv_heads, programs)](
        q_BNH, pool_layer, q_BNH if scales is None else scales, q_BNH if sinks_N is None else sinks_N,
        page_table_BP, context_lens_B, o_BNH, partial_WNH, lse_WN,
        plan.start_B1, plan.size_1, plan.sequence_W, num_sequences,
        scores.factor, scores.cap, window or 0,
        q_BNH.stride(0), q_BNH.stride(1), o_BNH.stride(0), o_BNH.stride(1), *pool_layer.stride()[:4],
        *((0, 0, 0) if scales is None else scales.stride()[:3]), page_table_BP.stride(0),
        GROUPS=groups, GROUPS_PADDED=config.rows, HEAD_DIM=head_dim, HEAD_DIM_PADDED=padded, PAGE_SIZE=page_size,
        TILE=config.tile, DOT_TYPE=dot_type(q_BNH.dtype, pool_layer.dtype), HAS_CAP=softcap is not None,
        HAS_SCALES=scales is not None, HAS_SINKS=sinks_N is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits:
        _join_items_kernel[(num_sequences, num_heads)](
            partial_WNH, lse_WN, plan.start_B1, o_BNH, o_BNH.stride(0), o_BNH.stride(1),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=padded, TILE=_JOINED, num_warps=4,
        )  # fmt: skip


def candidates(default: KernelConfig) -> list[KernelConfig]:
    """Returns the configurations that `benchmarks.gpu.tune` tries."""
    return [
        KernelConfig(default.rows, tile, num_warps, num_stages)
        for tile in (16, 32, 64, 128)
        for num_warps in (2, 4, 8)
        for num_stages in (3, 5, 7)
    ]


def tuning_shape(q: torch.Tensor, pool_layer: torch.Tensor, groups: int) -> str:
    return f"{pool_layer.dtype} head_dim {q.shape[2]} groups {groups} page {pool_layer.shape[3]}"


def _select(q_BNH: torch.Tensor, pool_layer: torch.Tensor, groups: int) -> KernelConfig:
    return select_config(
        "paged_decode", tuning_shape(q_BNH, pool_layer, groups), default_config(pool_layer, groups), q_BNH.device
    )


def default_config(pool_layer: torch.Tensor, groups: int) -> KernelConfig:
    """Returns the untuned configuration. A tensor core takes at least 16 rows."""
    row_bytes = next_power_of_2(pool_layer.shape[4]) * pool_layer.element_size()
    # With tiles of 64 8-bit values, registers suffice for two programs; with 32 for three.
    tile = min(max(_TILE_BYTES // row_bytes, 16), 64 if pool_layer.itemsize > 1 else 32)
    return KernelConfig(max(16, next_power_of_2(groups)), tile, num_warps=4, num_stages=_STAGES)


@triton.jit(
    do_not_specialize=[*PER_STEP["do_not_specialize"], "num_sequences"],
    do_not_specialize_on_alignment=PER_STEP["do_not_specialize_on_alignment"],
)
def _decode_kernel(
    q_ptr,  # [B, N, H], last stride 1
    pool_ptr,  # [P, 2, K, S, H], last stride 1
    scales_ptr,  # fp32 [P, 2, K, S], last stride 1; read only with HAS_SCALES
    sinks_ptr,  # [N]; read only with HAS_SINKS
    page_table_ptr,  # int32 [B, max_pages], last stride 1
    context_lens_ptr,  # int32 [B]
    o_ptr,  # [B, N, H], last stride 1; written for sequences of one item
    partial_o_ptr,  # fp32 [W, N, H] contiguous; written for the items of all others
    partial_lse_ptr,  # fp32 [W, N] contiguous, log2
    start_ptr,  # int32 [B + 1]; see `DecodePlan`
    size_ptr,  # int32 [1]
    sequence_ptr,  # int32 [W]
    num_sequences,
    factor,  # see `Scores`
    cap,
    window,  # 0: none
    q_stride_b,
    q_stride_n,
    o_stride_b,
    o_stride_n,
    pool_stride_p,
    pool_stride_kind,
    pool_stride_k,
    pool_stride_s,
    scales_stride_p,
    scales_stride_kind,
    scales_stride_k,
    table_stride_b,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # grid: (K, programs): heads of one page are adjacent
    kv_head = tl.program_id(0)
    num_items = tl.load(start_ptr + num_sequences)
    size = tl.load(size_ptr)
    group_G = tl.arange(0, GROUPS_PADDED)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    in_group_G = group_G < GROUPS
    mask_GH = in_group_G[:, None] & (dim_H < HEAD_DIM)[None, :]
    head_G = kv_head * GROUPS + group_G
    keys = pool_ptr + kv_head * pool_stride_k
    key_scales = scales_ptr + kv_head * scales_stride_k
    for item in range(tl.program_id(1), num_items, tl.num_programs(1)):
        sequence = tl.load(sequence_ptr + item).to(tl.int64)
        first_item = tl.load(start_ptr + sequence)
        is_whole = tl.load(start_ptr + sequence + 1) == first_item + 1
        context_len = tl.load(context_lens_ptr + sequence)
        first_visible = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
        begin = first_visible + (item - first_item) * size
        end = tl.minimum(begin + size, context_len)
        q_ptr_GH = q_ptr + sequence * q_stride_b + head_G[:, None] * q_stride_n + dim_H[None, :]
        q_GH = tl.load(q_ptr_GH, mask=mask_GH, other=0.0).to(DOT_TYPE)
        max_G = tl.full([GROUPS_PADDED], float("-inf"), tl.float32)
        sum_G = tl.zeros([GROUPS_PADDED], tl.float32)
        if HAS_SINKS:
            max_G, sum_G = begin_with_sinks(sinks_ptr + head_G, in_group_G, item - first_item, max_G, sum_G)
        max_G, sum_G, o_GH = attend(
            q_GH, group_G, max_G, sum_G, tl.zeros([GROUPS_PADDED, HEAD_DIM_PADDED], tl.float32), begin, end,
            page_table_ptr + sequence * table_stride_b, keys, keys + pool_stride_kind, key_scales,
            key_scales + scales_stride_kind, pool_stride_p, pool_stride_s, scales_stride_p, factor, cap, window,
            HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, TILE, DOT_TYPE, HAS_CAP, HAS_SCALES, 1,
        )  # fmt: skip
        divisor_G = tl.where(sum_G > 0, sum_G, 1.0)
        o_GH = o_GH / (divisor_G * LIFT if HAS_SCALES else divisor_G)[:, None]
        if is_whole:
            o_ptr_GH = o_ptr + sequence * o_stride_b + head_G[:, None] * o_stride_n + dim_H[None, :]
            tl.store(o_ptr_GH, o_GH.to(o_ptr.dtype.element_ty), mask=mask_GH)
        else:
            row_G = (tl.full([], 0, tl.int64) + item) * tl.num_programs(0) * GROUPS + head_G
            tl.store(partial_lse_ptr + row_G, max_G + tl.log2(divisor_G), mask=in_group_G)
            tl.store(partial_o_ptr + row_G[:, None] * HEAD_DIM + dim_H[None, :], o_GH, mask=mask_GH)


@triton.jit
def _join_items_kernel(
    partial_o_ptr,  # fp32 [W, N, H] contiguous
    partial_lse_ptr,  # fp32 [W, N] contiguous, log2
    start_ptr,  # int32 [B + 1]
    o_ptr,  # [B, N, H], last stride 1
    o_stride_b,
    o_stride_n,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # grid: (B, N)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(start_ptr + sequence)
    past = tl.load(start_ptr + sequence + 1)
    if past == first + 1:
        return
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    in_head_H = dim_H < HEAD_DIM
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    o_H = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for start in range(first, past, TILE):  # every item has a token, so `largest` is finite after the first
        item_X = start + tl.arange(0, TILE)
        row_X = item_X.to(tl.int64) * NUM_HEADS + head
        lse_X = tl.load(partial_lse_ptr + row_X, mask=item_X < past, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse_X, 0))
        weight_X = tl.exp2(lse_X - new_largest)
        shrink = tl.exp2(largest - new_largest)
        o_mask_XH = (item_X < past)[:, None] & in_head_H[None, :]
        o_XH = tl.load(partial_o_ptr + row_X[:, None] * HEAD_DIM + dim_H[None, :], mask=o_mask_XH, other=0.0)
        o_H = o_H * shrink + tl.sum(o_XH * weight_X[:, None], 0)
        total = total * shrink + tl.sum(weight_X, 0)
        largest = new_largest
    o_H = o_H / total
    tl.store(o_ptr + sequence * o_stride_b + head * o_stride_n + dim_H, o_H.to(o_ptr.dtype.element_ty), mask=in_head_H)
