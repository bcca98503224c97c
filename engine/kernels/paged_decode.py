"""Attention of one new token per sequence over its pages (Triton).

One program reads a stretch of one sequence's context for one KV head and answers all query heads that share it, so
that K and V leave memory once. Long contexts are split among programs and their partial results joined by a second
kernel, weighted by their log-sum-exp: Dao et al. 2023, "Flash-Decoding for long-context inference".
The plain-torch twin is `engine.kernels.reference`.

Shapes: `B` sequences, `N` query heads, `K` KV heads, `G` = N / K, `H` head dim, `P` pages, `S` page size, `X` splits,
`C` context tokens of a tile.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described where they stand)

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index, check_queries
from engine.kernels.dot_type import dot_type

_LOG2_E = 1.4426950408889634
_MIN_SPLIT_TOKENS = 256  # below, joining costs more than a program more gains
_MAX_SPLITS = 64
_PROGRAMS_PER_SM = 4  # resident at once with 4 warps and these tiles


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
    num_splits: int | None = None,
) -> None:
    """Write attention of each sequence's last token into `o_BNH`. fp32 arithmetic inside, whatever the dtype.

    `page_table_BP` and `context_lens_B` are int32; a sequence of context 0 (padding of a batch) gets zeros. `window`
    counts the query itself. `num_splits` is chosen from batch and context where it is None.
    """
    num_sequences, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = pool_layer.shape[2:4]
    check_queries("paged_decode", q_BNH, o_BNH, pool_layer)
    check_index("paged_decode", "page_table_BP", page_table_BP, torch.int32, (num_sequences, -1))
    check_index("paged_decode", "context_lens_B", context_lens_B, torch.int32, (num_sequences,))
    if num_sequences == 0:
        return
    reach = max_context_len if window is None else min(window, max_context_len)
    splits = num_splits or _choose_splits(num_sequences * num_kv_heads, reach, q_BNH.device)
    shape = (num_sequences, num_heads, splits)
    partial_o_BNXH = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_BNH.device)
    partial_lse_BNX = torch.empty(shape, dtype=torch.float32, device=q_BNH.device)
    groups = num_heads // num_kv_heads
    _decode_kernel[(num_sequences, num_kv_heads, splits)](
        q_BNH, pool_layer, page_table_BP, context_lens_B, partial_o_BNXH, partial_lse_BNX,
        scale * _LOG2_E, window or 0,
        q_BNH.stride(0), q_BNH.stride(1), *pool_layer.stride()[:4], page_table_BP.stride(0),
        GROUPS=groups, GROUPS_PADDED=max(16, triton.next_power_of_2(groups)), HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)), PAGE_SIZE=page_size, NUM_SPLITS=splits,
        TILE=32 if head_dim > 128 or q_BNH.dtype == torch.float32 else 64, DOT_TYPE=dot_type(q_BNH.dtype),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _join_kernel[(num_sequences, num_heads)](
        partial_o_BNXH, partial_lse_BNX, o_BNH, o_BNH.stride(0), o_BNH.stride(1),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        NUM_SPLITS=splits, SPLITS_PADDED=triton.next_power_of_2(splits), num_warps=1,
    )  # fmt: skip


def _choose_splits(num_programs: int, reach: int, device: torch.device) -> int:
    """Enough programs to fill the device, none with a stretch too short to pay for itself."""
    wanted = -(-_PROGRAMS_PER_SM * _num_multiprocessors(device) // num_programs)
    return max(1, min(wanted, reach // _MIN_SPLIT_TOKENS, _MAX_SPLITS))


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _decode_kernel(
    q_ptr,  # [B, N, H], last stride 1
    pool_ptr,  # [P, 2, K, S, H], last stride 1
    page_table_ptr,  # int32 [B, max_pages], last stride 1
    context_lens_ptr,  # int32 [B]
    partial_o_ptr,  # fp32 [B, N, X, H] contiguous
    partial_lse_ptr,  # fp32 [B, N, X] contiguous, log2
    scale_log2,  # scale * log2(e): exponentials are powers of 2
    window,  # 0: none
    q_stride_b,
    q_stride_n,
    pool_stride_p,
    pool_stride_kind,
    pool_stride_k,
    pool_stride_s,
    table_stride_b,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,  # at least 16: what a tensor core takes
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):  # grid: (B, K, X)
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + sequence)
    first_visible = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
    split_len = tl.cdiv(tl.cdiv(context_len - first_visible, TILE), NUM_SPLITS) * TILE
    begin = first_visible + split * split_len
    end = tl.minimum(begin + split_len, context_len)

    group_G = tl.arange(0, GROUPS_PADDED)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    tile_C = tl.arange(0, TILE)
    in_group_G = group_G < GROUPS
    in_head_H = dim_H < HEAD_DIM
    head_G = kv_head * GROUPS + group_G
    q_offset_GH = sequence.to(tl.int64) * q_stride_b + head_G[:, None] * q_stride_n + dim_H[None, :]
    q_GH = tl.load(q_ptr + q_offset_GH, mask=in_group_G[:, None] & in_head_H[None, :], other=0.0).to(DOT_TYPE)

    max_G = tl.full([GROUPS_PADDED], float("-inf"), tl.float32)
    sum_G = tl.zeros([GROUPS_PADDED], tl.float32)
    o_GH = tl.zeros([GROUPS_PADDED, HEAD_DIM_PADDED], tl.float32)
    for start in range(begin, end, TILE):
        token_C = start + tile_C
        seen_C = token_C < end
        page_C = tl.load(page_table_ptr + sequence * table_stride_b + token_C // PAGE_SIZE, mask=seen_C, other=0)
        place_C = page_C.to(tl.int64) * pool_stride_p + kv_head * pool_stride_k + (token_C % PAGE_SIZE) * pool_stride_s
        kv_ptr_CH = pool_ptr + place_C[:, None] + dim_H[None, :]
        kv_mask_CH = seen_C[:, None] & in_head_H[None, :]
        k_CH = tl.load(kv_ptr_CH, mask=kv_mask_CH, other=0.0).to(DOT_TYPE)
        score_GC = tl.dot(q_GH, tl.trans(k_CH), input_precision="ieee") * scale_log2
        score_GC = tl.where(seen_C[None, :], score_GC, float("-inf"))
        new_max_G = tl.maximum(max_G, tl.max(score_GC, 1))  # finite: begin < end, so a tile sees a token
        weight_GC = tl.exp2(score_GC - new_max_G[:, None])
        shrink_G = tl.exp2(max_G - new_max_G)
        sum_G = sum_G * shrink_G + tl.sum(weight_GC, 1)
        # Unwritten slots may hold NaN, and NaN x 0 is NaN: V is masked like K.
        v_CH = tl.load(kv_ptr_CH + pool_stride_kind, mask=kv_mask_CH, other=0.0).to(DOT_TYPE)
        o_GH = o_GH * shrink_G[:, None] + tl.dot(weight_GC.to(DOT_TYPE), v_CH, input_precision="ieee")
        max_G = new_max_G

    # A split without tokens has maximum and log-sum-exp -inf: it weighs nothing when the splits are joined.
    divisor_G = tl.where(sum_G > 0, sum_G, 1.0)
    o_GH = o_GH / divisor_G[:, None]
    row_G = (sequence * tl.num_programs(1) * GROUPS + head_G).to(tl.int64) * NUM_SPLITS + split
    tl.store(partial_lse_ptr + row_G, max_G + tl.log2(divisor_G), mask=in_group_G)
    tl.store(
        partial_o_ptr + row_G[:, None] * HEAD_DIM + dim_H[None, :], o_GH, mask=in_group_G[:, None] & in_head_H[None, :]
    )


@triton.jit
def _join_kernel(
    partial_o_ptr,  # fp32 [B, N, X, H] contiguous
    partial_lse_ptr,  # fp32 [B, N, X] contiguous, log2
    o_ptr,  # [B, N, H], last stride 1
    o_stride_b,
    o_stride_n,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):  # grid: (B, N)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split_X = tl.arange(0, SPLITS_PADDED)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    in_splits_X = split_X < NUM_SPLITS
    in_head_H = dim_H < HEAD_DIM
    row_X = (sequence * NUM_HEADS + head) * NUM_SPLITS + split_X
    lse_X = tl.load(partial_lse_ptr + row_X, mask=in_splits_X, other=float("-inf"))
    largest = tl.max(lse_X, 0)
    weight_X = tl.exp2(lse_X - tl.where(largest == float("-inf"), 0.0, largest))
    o_mask_XH = in_splits_X[:, None] & in_head_H[None, :]
    o_XH = tl.load(partial_o_ptr + row_X[:, None] * HEAD_DIM + dim_H[None, :], mask=o_mask_XH, other=0.0)
    total = tl.sum(weight_X, 0)
    o_H = tl.sum(o_XH * weight_X[:, None], 0) / tl.where(total > 0, total, 1.0)
    o_offset_H = sequence * o_stride_b + head * o_stride_n + dim_H
    tl.store(o_ptr + o_offset_H, o_H.to(o_ptr.dtype.element_ty), mask=in_head_H)
