"""Causal attention of a chunk of each prompt over its pages (Triton).

A chunk's queries are the last tokens of the context; the pages hold the KV of all earlier tokens and of the chunk. One
program serves a tile of rows, each row being one query of one of the heads that share a KV head, so K and V are read
once for all of them, and a short chunk fills its tile. It reads only what some row of the tile can see, without a mask
where all rows can. Where chunks are few and the context is long, the context is split as in `paged_decode`. Reference:
`engine.kernels.reference`.

Shapes: `B` sequences, `T` query tokens of all, `N` query heads, `K` KV heads, `G` = N / K, `H` head dim, `P` pages,
`S` page size, `X` splits, `R` rows of a tile, `C` context tokens of a tile.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_interface import MIN_SPLIT_TOKENS
from engine.kernels.checks import check_index, check_queries, check_sinks
from engine.kernels.triton.attention.attend import LIFT, Scores, attend, begin_with_sinks
from engine.kernels.triton.attention.join_splits import PER_STEP, Partials, choose_splits, join_splits, split_of
from engine.kernels.triton.attention.tuning import KernelConfig, fitted, select_config
from engine.kernels.triton.common import cdiv, dot_type, next_power_of_2


def paged_prefill(
    q_TNH: torch.Tensor,
    pool_layer: torch.Tensor,
    page_table_BP: torch.Tensor,
    query_start_B1: torch.Tensor,
    context_lens_B: torch.Tensor,
    o_TNH: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_context_len: int,
    first_row: int = 0,
    softcap: float | None = None,
    scales: torch.Tensor | None = None,
    sinks_N: torch.Tensor | None = None,
    num_splits: int | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Writes attention of every query of sequence b, rows `query_start_B1[b]` to `[b + 1]`, into `o_TNH`.

    The index tensors are int32. Query i of n of a sequence has position `context_lens_B[b] - n + i`; `window` counts
    the query itself; both maxima are bounds. Rows before `first_row` belong to no sequence and are left unchanged.
    `scales`, `num_splits` and `config` are as in `paged_decode`. Computes in fp32, whatever the dtype.
    """
    num_sequences = context_lens_B.shape[0]
    num_heads, head_dim = q_TNH.shape[1:]
    num_kv_heads, page_size = pool_layer.shape[2:4]
    check_sinks("paged_prefill", sinks_N, num_heads)
    check_queries("paged_prefill", q_TNH, o_TNH, pool_layer, scales)
    check_index("paged_prefill", "page_table_BP", page_table_BP, torch.int32, (num_sequences, -1))
    check_index("paged_prefill", "query_start_B1", query_start_B1, torch.int32, (num_sequences + 1,))
    check_index("paged_prefill", "context_lens_B", context_lens_B, torch.int32, (num_sequences,))
    if num_sequences == 0 or max_query_len == 0:
        return
    groups = num_heads // num_kv_heads
    config = config or _select(q_TNH, pool_layer, groups, max_query_len)
    padded = max(16, next_power_of_2(head_dim))
    tiles = cdiv(max_query_len, config.rows // groups)
    reach = max_context_len if window is None else min(window + config.rows // groups, max_context_len)
    tile_bytes = padded * (
        config.rows * q_TNH.element_size() + 2 * config.num_stages * config.tile * pool_layer.itemsize
    )
    splits = num_splits or choose_splits(tiles * num_kv_heads * num_sequences, reach, tile_bytes, q_TNH.device)
    partials = Partials.empty(q_TNH, splits) if splits > 1 else None
    scores = Scores.of(scale, softcap)
    _prefill_kernel[(tiles, num_kv_heads * splits, num_sequences)](
        q_TNH, pool_layer, q_TNH if scales is None else scales, q_TNH if sinks_N is None else sinks_N,
        page_table_BP, query_start_B1, context_lens_B, o_TNH,
        o_TNH if partials is None else partials.o_TNXH, o_TNH if partials is None else partials.lse_TNX,
        scores.factor, scores.cap, window or 0,
        q_TNH.stride(0), q_TNH.stride(1), o_TNH.stride(0), o_TNH.stride(1), *pool_layer.stride()[:4],
        *((0, 0, 0) if scales is None else scales.stride()[:3]), page_table_BP.stride(0), splits,
        GROUPS=groups, HEAD_DIM=head_dim, HEAD_DIM_PADDED=padded, PAGE_SIZE=page_size,
        SPLIT=splits > 1, MIN_TOKENS=MIN_SPLIT_TOKENS if num_splits is None else config.tile,
        ROWS=config.rows, TILE=config.tile, DOT_TYPE=dot_type(q_TNH.dtype, pool_layer.dtype),
        HAS_CAP=softcap is not None, HAS_SCALES=scales is not None,
        HAS_SINKS=sinks_N is not None, HAS_WINDOW=window is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if partials is not None:
        join_splits(partials.after(first_row), o_TNH[first_row:])


def candidates(default: KernelConfig) -> list[KernelConfig]:
    """Returns the configurations that `benchmarks.gpu.tune` tries; tiles of 128 rows are for long chunks."""
    rows = (64, 128) if default.rows >= 64 else (default.rows,)
    return [
        KernelConfig(count, tile, num_warps, num_stages)
        for count in rows
        for tile in (32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 5)
    ]


def tuning_shape(q: torch.Tensor, pool_layer: torch.Tensor, groups: int, rows: int) -> str:
    return f"{pool_layer.dtype} head_dim {q.shape[2]} groups {groups} page {pool_layer.shape[3]} rows {rows}"


def _select(q_TNH: torch.Tensor, pool_layer: torch.Tensor, groups: int, max_query_len: int) -> KernelConfig:
    default = default_config(q_TNH, pool_layer, groups, max_query_len)
    return select_config("paged_prefill", tuning_shape(q_TNH, pool_layer, groups, default.rows), default, q_TNH.device)


def default_config(q: torch.Tensor, pool_layer: torch.Tensor, groups: int, max_query_len: int) -> KernelConfig:
    """Returns the untuned configuration: enough rows for the longest chunk, up to what two groups of four warps
    multiply at once on a Hopper, within the device's shared memory."""
    wanted = max(16, next_power_of_2(max_query_len * groups), next_power_of_2(groups))
    if q.dtype == torch.float32:  # not on tensor cores: registers are scarce
        return KernelConfig(min(wanted, max(32, next_power_of_2(groups))), 32, num_warps=4, num_stages=2)
    rows = min(wanted, max(128, next_power_of_2(groups)))
    head_dim = next_power_of_2(pool_layer.shape[4])
    tile = 128 if head_dim <= 64 else 64
    if pool_layer.itemsize == 1 and head_dim != 128:  # codes take registers besides their decoded values
        tile //= 2
    config = KernelConfig(rows, tile, num_warps=8 if rows >= 128 else 4, num_stages=2 if head_dim > 128 else 5)

    def needed(tried: KernelConfig) -> int:
        """Returns the bytes of the queries and of the tiles of K and V that are on their way, as a Hopper has them."""
        tiles = 2 * (tried.num_stages // 2 + 1) * tried.tile * pool_layer.element_size()
        return head_dim * (tried.rows * q.element_size() + tiles) + 1024

    return fitted(config, needed, q.device)


@triton.jit(**PER_STEP)
def _prefill_kernel(
    q_ptr,  # [T, N, H], last stride 1
    pool_ptr,  # [P, 2, K, S, H], last stride 1
    scales_ptr,  # fp32 [P, 2, K, S], last stride 1; read only with HAS_SCALES
    sinks_ptr,  # [N]; read only with HAS_SINKS
    page_table_ptr,  # int32 [B, max_pages], last stride 1
    query_start_ptr,  # int32 [B + 1]
    context_lens_ptr,  # int32 [B]
    o_ptr,  # [T, N, H], last stride 1; written unless SPLIT
    partial_o_ptr,  # fp32 [T, N, X, H] contiguous; written only with SPLIT
    partial_lse_ptr,  # fp32 [T, N, X] contiguous, log2; written only with SPLIT
    factor,  # see `Scores`
    cap,
    window,  # 0: none
    q_stride_t,
    q_stride_n,
    o_stride_t,
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,  # whether X > 1
    MIN_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # grid: (tiles of the longest chunk, K * X, B): tiles of one head are adjacent, since they read the same pages
    QUERIES: tl.constexpr = ROWS // GROUPS  # of a tile; remaining rows stay empty
    sequence = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1) // num_splits
    split = tl.program_id(1) % num_splits
    first_row = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_row
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the last queries see most: they begin first
    if first_query >= num_queries:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    row_R = tl.arange(0, ROWS)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    query_R = first_query + row_R // GROUPS
    position_R = context_len - num_queries + query_R
    is_row_R = (query_R < num_queries) & (row_R < QUERIES * GROUPS)
    mask_RH = is_row_R[:, None] & (dim_H < HEAD_DIM)[None, :]
    token_R = (first_row + query_R).to(tl.int64)
    head_R = kv_head * GROUPS + row_R % GROUPS
    q_ptr_RH = q_ptr + (token_R * q_stride_t + head_R * q_stride_n)[:, None] + dim_H[None, :]
    q_RH = tl.load(q_ptr_RH, mask=mask_RH, other=0.0).to(DOT_TYPE)

    first_position = context_len - num_queries + first_query
    last_position = tl.minimum(first_position + QUERIES, context_len) - 1
    first_visible = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
    begin, end = split_of(first_visible, last_position + 1, split, num_splits, TILE, MIN_TOKENS)
    # Whole tiles that all rows see: up to the first query, and from the last query's window on.
    all_from = begin
    if HAS_WINDOW:
        all_from += tl.cdiv(tl.maximum(last_position - window + 1 - begin, 0), TILE) * TILE
        all_from = tl.minimum(all_from, tl.maximum(end, begin))
    all_to = all_from + tl.maximum(tl.minimum(first_position + 1, end) - all_from, 0) // TILE * TILE

    max_R = tl.full([ROWS], float("-inf"), tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        max_R, sum_R = begin_with_sinks(sinks_ptr + head_R, is_row_R, split, max_R, sum_R)
    o_RH = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    table = page_table_ptr + sequence * table_stride_b
    keys = pool_ptr + kv_head * pool_stride_k
    key_scales = scales_ptr + kv_head * scales_stride_k
    if HAS_WINDOW:
        max_R, sum_R, o_RH = attend(
            q_RH, position_R, max_R, sum_R, o_RH, begin, all_from, table, keys, keys + pool_stride_kind, key_scales,
            key_scales + scales_stride_kind, pool_stride_p, pool_stride_s, scales_stride_p, factor, cap, window,
            HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, TILE, DOT_TYPE, HAS_CAP, HAS_SCALES, 2,
        )  # fmt: skip
    max_R, sum_R, o_RH = attend(
        q_RH, position_R, max_R, sum_R, o_RH, all_from, all_to, table, keys, keys + pool_stride_kind, key_scales,
        key_scales + scales_stride_kind, pool_stride_p, pool_stride_s, scales_stride_p, factor, cap, window,
        HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, TILE, DOT_TYPE, HAS_CAP, HAS_SCALES, 0,
    )  # fmt: skip
    max_R, sum_R, o_RH = attend(
        q_RH, position_R, max_R, sum_R, o_RH, all_to, end, table, keys, keys + pool_stride_kind, key_scales,
        key_scales + scales_stride_kind, pool_stride_p, pool_stride_s, scales_stride_p, factor, cap, window,
        HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, TILE, DOT_TYPE, HAS_CAP, HAS_SCALES, 2,
    )  # fmt: skip

    divisor_R = tl.where(sum_R > 0, sum_R, 1.0)
    o_RH = o_RH / (divisor_R * LIFT if HAS_SCALES else divisor_R)[:, None]
    if SPLIT:
        place_R = (token_R * (tl.num_programs(1) // num_splits * GROUPS) + head_R) * num_splits + split
        tl.store(partial_lse_ptr + place_R, max_R + tl.log2(divisor_R), mask=is_row_R)
        tl.store(partial_o_ptr + place_R[:, None] * HEAD_DIM + dim_H[None, :], o_RH, mask=mask_RH)
    else:
        o_ptr_RH = o_ptr + (token_R * o_stride_t + head_R * o_stride_n)[:, None] + dim_H[None, :]
        tl.store(o_ptr_RH, o_RH.to(o_ptr.dtype.element_ty), mask=mask_RH)
