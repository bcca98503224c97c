"""Attention of one new token per sequence over its pages (Triton).

One program reads a range of one sequence's context for one KV head and serves all query heads that share it, so that K
and V are read from memory once. Long contexts are split among programs, and a second kernel joins their partial results
(`engine.kernels.triton.attention.join_splits`); a sequence that is not split is written directly. Only the device knows
the actual context lengths: a CUDA graph captured with a bound serves all shorter contexts. Reference:
`engine.kernels.reference`.

Shapes: `B` sequences, `N` query heads, `K` KV heads, `G` = N / K, `H` head dim, `P` pages, `S` page size, `X` splits,
`C` context tokens of a tile.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described beside them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index, check_queries, check_sinks
from engine.kernels.metadata import MIN_SPLIT_TOKENS
from engine.kernels.triton.attention.attend import LIFT, Scores, attend, begin_with_sinks
from engine.kernels.triton.attention.join_splits import PER_STEP, Partials, choose_splits, join_splits, split_of
from engine.kernels.triton.attention.tuning import KernelConfig, select_config
from engine.kernels.triton.common import dot_type, next_power_of_2

_TILE_BYTES = 16384  # of K, and the same of V
# A stage looks up pages, the next reads their tokens, the next uses them: with five stages each program has two tiles
# of K and V on its multiprocessor, and three programs fit.
_STAGES = 5


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
    num_splits: int | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Writes attention of each sequence's last token into `o_BNH`. Computes in fp32, whatever the dtype.

    `page_table_BP` and `context_lens_B` are int32; a sequence of context 0 (padding of a batch) gets zeros. `window`
    counts the query itself; `max_context_len` is a bound. An 8-bit pool has `scales`, fp32 [P, 2, K, S]. By default
    `num_splits` is chosen from the batch and the bound, and `config` by `engine.kernels.triton.attention.tuning`.
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
    reach = max_context_len if window is None else min(window, max_context_len)
    tile_bytes = 2 * ((config.num_stages - 1) // 2) * config.tile * padded * pool_layer.element_size()
    splits = num_splits or choose_splits(num_sequences * num_kv_heads, reach, tile_bytes, q_BNH.device)
    partials = Partials.empty(q_BNH, splits) if splits > 1 else None
    scores = Scores.of(scale, softcap)
    _decode_kernel[(num_kv_heads, splits, num_sequences)](
        q_BNH, pool_layer, q_BNH if scales is None else scales, q_BNH if sinks_N is None else sinks_N,
        page_table_BP, context_lens_B, o_BNH,
        o_BNH if partials is None else partials.o_TNXH, o_BNH if partials is None else partials.lse_TNX,
        scores.factor, scores.cap, window or 0,
        q_BNH.stride(0), q_BNH.stride(1), o_BNH.stride(0), o_BNH.stride(1), *pool_layer.stride()[:4],
        *((0, 0, 0) if scales is None else scales.stride()[:3]), page_table_BP.stride(0), splits,
        GROUPS=groups, GROUPS_PADDED=config.rows, HEAD_DIM=head_dim, HEAD_DIM_PADDED=padded, PAGE_SIZE=page_size,
        SPLIT=splits > 1, MIN_TOKENS=MIN_SPLIT_TOKENS if num_splits is None else config.tile, TILE=config.tile,
        DOT_TYPE=dot_type(q_BNH.dtype, pool_layer.dtype), HAS_CAP=softcap is not None, HAS_SCALES=scales is not None,
        HAS_SINKS=sinks_N is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if partials is not None:
        join_splits(partials, o_BNH)


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


@triton.jit(**PER_STEP)
def _decode_kernel(
    q_ptr,  # [B, N, H], last stride 1
    pool_ptr,  # [P, 2, K, S, H], last stride 1
    scales_ptr,  # fp32 [P, 2, K, S], last stride 1; read only with HAS_SCALES
    sinks_ptr,  # [N]; read only with HAS_SINKS
    page_table_ptr,  # int32 [B, max_pages], last stride 1
    context_lens_ptr,  # int32 [B]
    o_ptr,  # [B, N, H], last stride 1; written unless SPLIT
    partial_o_ptr,  # fp32 [B, N, X, H] contiguous; written only with SPLIT
    partial_lse_ptr,  # fp32 [B, N, X] contiguous, log2; written only with SPLIT
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
    num_splits,  # X
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,  # whether X > 1
    MIN_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # grid: (K, X, B): heads of one page are adjacent
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + sequence)
    first_visible = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
    begin, end = split_of(first_visible, context_len, split, num_splits, TILE, MIN_TOKENS)

    group_G = tl.arange(0, GROUPS_PADDED)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    in_group_G = group_G < GROUPS
    mask_GH = in_group_G[:, None] & (dim_H < HEAD_DIM)[None, :]
    head_G = kv_head * GROUPS + group_G
    row_G = (sequence * tl.num_programs(0) * GROUPS + head_G) * num_splits + split
    max_G = tl.full([GROUPS_PADDED], float("-inf"), tl.float32)
    if SPLIT & (begin >= end):
        tl.store(partial_lse_ptr + row_G, max_G, mask=in_group_G)
        return

    q_ptr_GH = q_ptr + sequence * q_stride_b + head_G[:, None] * q_stride_n + dim_H[None, :]
    q_GH = tl.load(q_ptr_GH, mask=mask_GH, other=0.0).to(DOT_TYPE)
    keys = pool_ptr + kv_head * pool_stride_k
    key_scales = scales_ptr + kv_head * scales_stride_k
    sum_G = tl.zeros([GROUPS_PADDED], tl.float32)
    if HAS_SINKS:
        max_G, sum_G = begin_with_sinks(sinks_ptr + head_G, in_group_G, split, max_G, sum_G)
    max_G, sum_G, o_GH = attend(
        q_GH, group_G, max_G, sum_G,
        tl.zeros([GROUPS_PADDED, HEAD_DIM_PADDED], tl.float32), begin, end,
        page_table_ptr + sequence * table_stride_b, keys, keys + pool_stride_kind, key_scales,
        key_scales + scales_stride_kind, pool_stride_p, pool_stride_s, scales_stride_p, factor, cap, window,
        HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, TILE, DOT_TYPE, HAS_CAP, HAS_SCALES, 1,
    )  # fmt: skip

    divisor_G = tl.where(sum_G > 0, sum_G, 1.0)
    o_GH = o_GH / (divisor_G * LIFT if HAS_SCALES else divisor_G)[:, None]
    if SPLIT:
        tl.store(partial_lse_ptr + row_G, max_G + tl.log2(divisor_G), mask=in_group_G)
        tl.store(partial_o_ptr + row_G[:, None] * HEAD_DIM + dim_H[None, :], o_GH, mask=mask_GH)
    else:
        o_ptr_GH = o_ptr + sequence * o_stride_b + head_G[:, None] * o_stride_n + dim_H[None, :]
        tl.store(o_ptr_GH, o_GH.to(o_ptr.dtype.element_ty), mask=mask_GH)
