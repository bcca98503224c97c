"""Causal attention over paged latents (Triton; DeepSeek-V2, arXiv:2405.04434, section 2.1).

All query heads read one vector per token: the whole vector is the key, its first part the value, so a tile is read once
and used twice. A row is a query of one head; a program serves a tile of rows: some queries of all heads, or some heads
of one query. Decodes and chunks use the same kernel; long contexts are split as in `paged_decode`. A token's vector
lies in a page as two halves. Reference: `latent_attention` of `engine.kernels.reference.TorchAttention`.

Shapes: `B` sequences, `T` query tokens, `N` heads, `C` rank of the latent, `E` its rotated part, `H` = (C + E) / 2,
`P` pages, `S` page size, `X` splits, `R` rows of a tile, `U` context tokens of a tile.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_interface import MIN_SPLIT_TOKENS
from engine.kernels.checks import MAX_LATENT_HALF, check_index, check_pool_layer, check_scales
from engine.kernels.triton.attention.attend import LOG2_E
from engine.kernels.triton.attention.join_splits import PER_STEP, Partials, choose_splits, join_splits, split_of
from engine.kernels.triton.attention.tuning import KernelConfig, select_config
from engine.kernels.triton.common import cdiv, dot_type, next_power_of_2


def paged_latent(
    q_TNH: torch.Tensor,
    pool_layer: torch.Tensor,
    page_table_BP: torch.Tensor,
    query_start_B1: torch.Tensor,
    context_lens_B: torch.Tensor,
    o_TNC: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    first_row: int = 0,
    scales: torch.Tensor | None = None,
    num_splits: int | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Writes attention of every query of sequence b into `o_TNC`; the arguments are those of `paged_prefill`.

    `q_TNH` [T, N, C + E], `pool_layer` [P, 2, 1, S, H], `o_TNC` contiguous but for T.
    """
    num_sequences, (num_heads, width) = context_lens_B.shape[0], q_TNH.shape[1:]
    rank, half, page_size = o_TNC.shape[2], pool_layer.shape[4], pool_layer.shape[3]
    _check(q_TNH, pool_layer, o_TNC, scales)
    check_index("paged_latent", "page_table_BP", page_table_BP, torch.int32, (num_sequences, -1))
    check_index("paged_latent", "query_start_B1", query_start_B1, torch.int32, (num_sequences + 1,))
    check_index("paged_latent", "context_lens_B", context_lens_B, torch.int32, (num_sequences,))
    if num_sequences == 0 or max_query_len == 0:
        return
    config = config or _select(q_TNH, pool_layer, max_query_len)
    heads = min(num_heads, config.rows)
    tiles, blocks = cdiv(max_query_len, config.rows // heads), cdiv(num_heads, heads)
    padded = next_power_of_2(rank)
    tile_bytes = config.num_stages * config.tile * padded * q_TNH.element_size()
    splits = num_splits or choose_splits(tiles * blocks * num_sequences, max_context_len, tile_bytes, q_TNH.device)
    partials = Partials.empty(o_TNC, splits) if splits > 1 else None
    _latent_kernel[(tiles, blocks * splits, num_sequences)](
        q_TNH, pool_layer, q_TNH if scales is None else scales, page_table_BP, query_start_B1, context_lens_B, o_TNC,
        o_TNC if partials is None else partials.o_TNXH, o_TNC if partials is None else partials.lse_TNX,
        scale * LOG2_E, q_TNH.stride(0), q_TNH.stride(1), o_TNC.stride(0), o_TNC.stride(1),
        pool_layer.stride(0), pool_layer.stride(1), pool_layer.stride(3),
        *((0, 0) if scales is None else scales.stride()[:2]), page_table_BP.stride(0), splits,
        NUM_HEADS=num_heads, HEADS=heads, RANK=rank, PART=max(16, padded // 2), ROPE=width - rank,
        ROPE_PADDED=max(16, next_power_of_2(width - rank)), HALF=half, PAGE_SIZE=page_size, SPLIT=splits > 1,
        MIN_TOKENS=MIN_SPLIT_TOKENS if num_splits is None else config.tile, ROWS=config.rows, TILE=config.tile,
        DOT_TYPE=dot_type(q_TNH.dtype), HAS_SCALES=scales is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if partials is not None:
        join_splits(partials.after(first_row), o_TNC[first_row:])


def _check(q_TNH: torch.Tensor, pool_layer: torch.Tensor, o_TNC: torch.Tensor, scales: torch.Tensor | None) -> None:
    check_pool_layer("paged_latent", pool_layer, MAX_LATENT_HALF)
    check_scales("paged_latent", scales, pool_layer)
    num_tokens, num_heads, width = q_TNH.shape
    if pool_layer.shape[2] != 1 or width != 2 * pool_layer.shape[4]:
        raise ValueError(
            f"paged_latent: q_TNH has shape {tuple(q_TNH.shape)}, the pool {tuple(pool_layer.shape)}; expected "
            "[P, 2, 1, S, H] and queries of 2 * H"
        )
    if o_TNC.shape[:2] != (num_tokens, num_heads) or not 0 < o_TNC.shape[2] < width or o_TNC.stride(2) != 1:
        raise ValueError(f"paged_latent: o_TNC has shape {tuple(o_TNC.shape)}, q_TNH {tuple(q_TNH.shape)}")
    if q_TNH.stride(2) != 1 or (scales is None and q_TNH.dtype != pool_layer.dtype) or q_TNH.dtype != o_TNC.dtype:
        raise ValueError(
            f"paged_latent: q_TNH is {q_TNH.dtype} with strides {q_TNH.stride()}, o_TNC {o_TNC.dtype}, the pool "
            f"{pool_layer.dtype}; expected one dtype, the last dense"
        )


def candidates(default: KernelConfig) -> list[KernelConfig]:
    """Returns the configurations that `benchmarks.gpu.tune` tries."""
    return [
        KernelConfig(rows, tile, num_warps, num_stages)
        for rows in {default.rows, min(2 * default.rows, 64)}
        for tile in (16, 32, 64)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 5)
    ]


def tuning_shape(q: torch.Tensor, pool_layer: torch.Tensor, rows: int) -> str:
    return f"{pool_layer.dtype} width {q.shape[2]} heads {q.shape[1]} page {pool_layer.shape[3]} rows {rows}"


def _select(q_TNH: torch.Tensor, pool_layer: torch.Tensor, max_query_len: int) -> KernelConfig:
    default = default_config(q_TNH, pool_layer, max_query_len)
    return select_config("paged_latent", tuning_shape(q_TNH, pool_layer, default.rows), default, q_TNH.device)


def default_config(q: torch.Tensor, pool_layer: torch.Tensor, max_query_len: int) -> KernelConfig:
    """Returns the untuned configuration. A row's sum takes 2 KiB of registers at rank 512: 32 rows fit, and with short
    tiles the 64 that a Hopper's matrix instructions need."""
    rows = min(max(16, next_power_of_2(q.shape[1] * max_query_len)), 32 if max_query_len == 1 else 64)
    if q.dtype == torch.float32:
        return KernelConfig(min(rows, 16), 16, num_warps=4, num_stages=2)
    tile = 32 if pool_layer.itemsize > 1 and rows < 64 else 16
    return KernelConfig(rows, tile, num_warps=8 if rows >= 32 else 4, num_stages=3)


@triton.jit(**PER_STEP)
def _latent_kernel(
    q_ptr,  # [T, N, C + E], last stride 1
    pool_ptr,  # [P, 2, 1, S, H], last stride 1
    scales_ptr,  # fp32 [P, 2, 1, S], last stride 1; read only with HAS_SCALES
    page_table_ptr,  # int32 [B, max_pages], last stride 1
    query_start_ptr,  # int32 [B + 1]
    context_lens_ptr,  # int32 [B]
    o_ptr,  # [T, N, C], last stride 1; written unless SPLIT
    partial_o_ptr,  # fp32 [T, N, X, C] contiguous; written only with SPLIT
    partial_lse_ptr,  # fp32 [T, N, X] contiguous, log2; written only with SPLIT
    scale_log2,  # scale * log2(e)
    q_stride_t,
    q_stride_n,
    o_stride_t,
    o_stride_n,
    pool_stride_p,
    pool_stride_kind,
    pool_stride_s,
    scales_stride_p,
    scales_stride_kind,
    table_stride_b,
    num_splits,  # X
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a tile
    RANK: tl.constexpr,
    PART: tl.constexpr,  # half of the rank, padded: a tile is processed in two parts, to save registers
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,  # whether X > 1
    MIN_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # grid: (tiles of the longest chunk, blocks of heads * X, B)
    QUERIES: tl.constexpr = ROWS // HEADS
    sequence = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1) % num_splits
    first_row = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_row
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first_query >= num_queries:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    row_R = tl.arange(0, ROWS)
    low_C = tl.arange(0, PART)
    high_C = PART + low_C
    rope_E = tl.arange(0, ROPE_PADDED)
    tile_U = tl.arange(0, TILE)
    query_R = first_query + row_R // HEADS
    head_R = tl.program_id(1) // num_splits * HEADS + row_R % HEADS
    is_row_R = (query_R < num_queries) & (row_R < QUERIES * HEADS) & (head_R < NUM_HEADS)
    position_R = context_len - num_queries + query_R
    token_R = (first_row + query_R).to(tl.int64)
    q_ptr_R1 = (q_ptr + token_R * q_stride_t + head_R * q_stride_n)[:, None]
    mask_RE = is_row_R[:, None] & (rope_E < ROPE)[None, :]
    low_RC, high_RC = is_row_R[:, None] & (low_C < RANK)[None, :], is_row_R[:, None] & (high_C < RANK)[None, :]
    q_low_RC = tl.load(q_ptr_R1 + low_C[None, :], mask=low_RC, other=0.0).to(DOT_TYPE)
    q_high_RC = tl.load(q_ptr_R1 + high_C[None, :], mask=high_RC, other=0.0).to(DOT_TYPE)
    q_RE = tl.load(q_ptr_R1 + RANK + rope_E[None, :], mask=mask_RE, other=0.0).to(DOT_TYPE)

    last_position = tl.minimum(context_len - num_queries + first_query + QUERIES, context_len) - 1
    begin, end = split_of(0, last_position + 1, split, num_splits, TILE, MIN_TOKENS)
    max_R = tl.full([ROWS], float("-inf"), tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    o_low_RC = tl.zeros([ROWS, PART], tl.float32)
    o_high_RC = tl.zeros([ROWS, PART], tl.float32)
    for start in range(begin, end, TILE):
        token_U = start + tile_U
        seen_U = token_U < end
        page_U = tl.load(page_table_ptr + sequence * table_stride_b + token_U // PAGE_SIZE, mask=seen_U, other=0).to(
            tl.int64
        )
        pool_U = pool_ptr + page_U * pool_stride_p + (token_U % PAGE_SIZE) * pool_stride_s
        first_U, second_U = tl.full([TILE], 1.0, tl.float32), tl.full([TILE], 1.0, tl.float32)
        if HAS_SCALES:
            scales_U = scales_ptr + page_U * scales_stride_p + token_U % PAGE_SIZE
            first_U = tl.load(scales_U, mask=seen_U, other=0.0)
            second_U = tl.load(scales_U + scales_stride_kind, mask=seen_U, other=0.0)
        low_UC = _load(pool_U, low_C, seen_U, first_U, second_U, pool_stride_kind, 0, RANK, HALF, HAS_SCALES, DOT_TYPE)
        high_UC = _load(
            pool_U, high_C, seen_U, first_U, second_U, pool_stride_kind, 0, RANK, HALF, HAS_SCALES, DOT_TYPE
        )
        key_UE = _load(
            pool_U, rope_E, seen_U, first_U, second_U, pool_stride_kind, RANK, ROPE, HALF, HAS_SCALES, DOT_TYPE
        )
        score_RU = tl.dot(q_low_RC, tl.trans(low_UC), input_precision="ieee")
        score_RU = tl.dot(q_high_RC, tl.trans(high_UC), score_RU, input_precision="ieee")
        score_RU = tl.dot(q_RE, tl.trans(key_UE), score_RU, input_precision="ieee") * scale_log2
        visible_RU = (token_U[None, :] <= position_R[:, None]) & seen_U[None, :]
        score_RU = tl.where(visible_RU, score_RU, float("-inf"))
        new_max_R = tl.maximum(max_R, tl.max(score_RU, 1))
        base_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
        weight_RU = tl.exp2(score_RU - base_R[:, None])
        shrink_R = tl.exp2(max_R - base_R)
        sum_R = sum_R * shrink_R + tl.sum(weight_RU, 1)
        weight_RU = weight_RU.to(DOT_TYPE)
        o_low_RC = tl.dot(weight_RU, low_UC, o_low_RC * shrink_R[:, None], input_precision="ieee")
        o_high_RC = tl.dot(weight_RU, high_UC, o_high_RC * shrink_R[:, None], input_precision="ieee")
        max_R = new_max_R

    divisor_R = tl.where(sum_R > 0, sum_R, 1.0)
    o_low_RC, o_high_RC = o_low_RC / divisor_R[:, None], o_high_RC / divisor_R[:, None]
    if SPLIT:
        place_R = (token_R * NUM_HEADS + head_R) * num_splits + split
        tl.store(partial_lse_ptr + place_R, max_R + tl.log2(divisor_R), mask=is_row_R)
        tl.store(partial_o_ptr + place_R[:, None] * RANK + low_C[None, :], o_low_RC, mask=low_RC)
        tl.store(partial_o_ptr + place_R[:, None] * RANK + high_C[None, :], o_high_RC, mask=high_RC)
    else:
        o_ptr_R1 = (o_ptr + token_R * o_stride_t + head_R * o_stride_n)[:, None]
        tl.store(o_ptr_R1 + low_C[None, :], o_low_RC.to(o_ptr.dtype.element_ty), mask=low_RC)
        tl.store(o_ptr_R1 + high_C[None, :], o_high_RC.to(o_ptr.dtype.element_ty), mask=high_RC)


@triton.jit
def _load(
    pool_U,  # the first half of a token's vector
    place_C,  # places of its values, counted from BEFORE
    seen_U,
    first_U,  # fp32, scales of the two halves
    second_U,
    stride_kind,  # from the first half to the second
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):  # returns [U, C], zeros where there is no value
    at_C = BEFORE + place_C
    ptr_UC = pool_U[:, None] + (at_C // HALF * stride_kind + at_C % HALF)[None, :]
    value_UC = tl.load(ptr_UC, mask=seen_U[:, None] & (place_C < WIDTH)[None, :], other=0.0)
    if HAS_SCALES:
        value_UC = value_UC.to(tl.float32) * tl.where((at_C < HALF)[None, :], first_U[:, None], second_U[:, None])
    return value_UC.to(DOT_TYPE)
