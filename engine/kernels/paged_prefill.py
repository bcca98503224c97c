"""Causal attention of a chunk of each prompt over its pages (Triton).

A chunk's queries are the last tokens of the context; the pages hold the KV of everything before them and of
themselves. One program answers a tile of one query head's queries with an online softmax over the context (Dao 2023,
"FlashAttention-2"), reading only tiles that some query of it can see. The plain-torch twin is
`engine.kernels.reference`.

Shapes: `B` sequences, `T` query tokens of all, `N` query heads, `K` KV heads, `H` head dim, `P` pages, `S` page size,
`Q` queries of a tile, `C` context tokens of a tile.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described where they stand)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index, check_queries
from engine.kernels.dot_type import dot_type

_LOG2_E = 1.4426950408889634


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
) -> None:
    """Write attention of every query of sequence b, rows `query_start_B1[b]` to `[b + 1]`, into `o_TNH`.

    The index tensors are int32. Query i of n of a sequence stands at position `context_lens_B[b] - n + i`; `window`
    counts the query itself. fp32 arithmetic inside, whatever the dtype.
    """
    num_sequences = context_lens_B.shape[0]
    num_heads, head_dim = q_TNH.shape[1:]
    num_kv_heads, page_size = pool_layer.shape[2:4]
    check_queries("paged_prefill", q_TNH, o_TNH, pool_layer)
    check_index("paged_prefill", "page_table_BP", page_table_BP, torch.int32, (num_sequences, -1))
    check_index("paged_prefill", "query_start_B1", query_start_B1, torch.int32, (num_sequences + 1,))
    check_index("paged_prefill", "context_lens_B", context_lens_B, torch.int32, (num_sequences,))
    if num_sequences == 0 or max_query_len == 0:
        return
    wide = head_dim > 128 or q_TNH.dtype == torch.float32
    tile_q = min(32 if wide else 64, max(16, triton.next_power_of_2(max_query_len)))
    _prefill_kernel[(triton.cdiv(max_query_len, tile_q), num_sequences, num_heads)](
        q_TNH, pool_layer, page_table_BP, query_start_B1, context_lens_B, o_TNH,
        scale * _LOG2_E, window or 0,
        q_TNH.stride(0), q_TNH.stride(1), o_TNH.stride(0), o_TNH.stride(1),
        *pool_layer.stride()[:4], page_table_BP.stride(0),
        GROUPS=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)), PAGE_SIZE=page_size,
        TILE_Q=tile_q, TILE=32 if wide else 64, DOT_TYPE=dot_type(q_TNH.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _prefill_kernel(
    q_ptr,  # [T, N, H], last stride 1
    pool_ptr,  # [P, 2, K, S, H], last stride 1
    page_table_ptr,  # int32 [B, max_pages], last stride 1
    query_start_ptr,  # int32 [B + 1]
    context_lens_ptr,  # int32 [B]
    o_ptr,  # [T, N, H], last stride 1
    scale_log2,  # scale * log2(e): exponentials are powers of 2
    window,  # 0: none
    q_stride_t,
    q_stride_n,
    o_stride_t,
    o_stride_n,
    pool_stride_p,
    pool_stride_kind,
    pool_stride_k,
    pool_stride_s,
    table_stride_b,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):  # grid: (tiles of the longest chunk, B, N)
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    first_row = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_row
    first_query = tl.program_id(0) * TILE_Q
    if first_query >= num_queries:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    query_Q = first_query + tl.arange(0, TILE_Q)
    position_Q = context_len - num_queries + query_Q
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    tile_C = tl.arange(0, TILE)
    is_query_Q = query_Q < num_queries
    in_head_H = dim_H < HEAD_DIM
    mask_QH = is_query_Q[:, None] & in_head_H[None, :]
    row_Q = (first_row + query_Q).to(tl.int64)
    q_QH = tl.load(
        q_ptr + row_Q[:, None] * q_stride_t + head * q_stride_n + dim_H[None, :], mask=mask_QH, other=0.0
    ).to(DOT_TYPE)

    first_position = context_len - num_queries + first_query
    begin = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
    end = tl.minimum(first_position + TILE_Q, context_len)
    max_Q = tl.full([TILE_Q], float("-inf"), tl.float32)
    sum_Q = tl.zeros([TILE_Q], tl.float32)
    o_QH = tl.zeros([TILE_Q, HEAD_DIM_PADDED], tl.float32)
    for start in range(begin, end, TILE):
        token_C = start + tile_C
        seen_C = token_C < end
        page_C = tl.load(page_table_ptr + sequence * table_stride_b + token_C // PAGE_SIZE, mask=seen_C, other=0)
        place_C = page_C.to(tl.int64) * pool_stride_p + (token_C % PAGE_SIZE) * pool_stride_s
        kv_ptr_CH = pool_ptr + (head // GROUPS) * pool_stride_k + place_C[:, None] + dim_H[None, :]
        kv_mask_CH = seen_C[:, None] & in_head_H[None, :]
        k_CH = tl.load(kv_ptr_CH, mask=kv_mask_CH, other=0.0).to(DOT_TYPE)
        score_QC = tl.dot(q_QH, tl.trans(k_CH), input_precision="ieee") * scale_log2
        distance_QC = position_Q[:, None] - token_C[None, :]
        visible_QC = (distance_QC >= 0) & seen_C[None, :] & ((window == 0) | (distance_QC < window))
        score_QC = tl.where(visible_QC, score_QC, float("-inf"))
        new_max_Q = tl.maximum(max_Q, tl.max(score_QC, 1))
        base_Q = tl.where(new_max_Q == float("-inf"), 0.0, new_max_Q)  # a query that has seen nothing yet
        weight_QC = tl.exp2(score_QC - base_Q[:, None])
        shrink_Q = tl.exp2(max_Q - base_Q)
        sum_Q = sum_Q * shrink_Q + tl.sum(weight_QC, 1)
        # Unwritten slots may hold NaN, and NaN x 0 is NaN: V is masked like K.
        v_CH = tl.load(kv_ptr_CH + pool_stride_kind, mask=kv_mask_CH, other=0.0).to(DOT_TYPE)
        o_QH = o_QH * shrink_Q[:, None] + tl.dot(weight_QC.to(DOT_TYPE), v_CH, input_precision="ieee")
        max_Q = new_max_Q

    o_QH = o_QH / tl.where(sum_Q > 0, sum_Q, 1.0)[:, None]
    o_ptr_QH = o_ptr + row_Q[:, None] * o_stride_t + head * o_stride_n + dim_H[None, :]
    tl.store(o_ptr_QH, o_QH.to(o_ptr.dtype.element_ty), mask=mask_QH)
