"""Splits a query's context among programs and joins their partial results by log-sum-exp (Triton).

It is the second pass of Dao et al. 2023, "Flash-Decoding for long-context inference". A split without tokens has
log-sum-exp -inf and no output. `choose_splits` decides how many splits are worthwhile.

Shapes: `T` query tokens, `N` query heads, `H` head dim, `X` splits.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_interface import MAX_SPLITS, MIN_SPLIT_TOKENS
from engine.kernels.triton import common
from engine.kernels.triton.common import next_power_of_2

_SHARED_BYTES = 227 * 1024  # of a Hopper's multiprocessor, available to programs
_MAX_RESIDENT = 4  # programs of four warps each that fit in the registers
# Arguments that change from step to step and must not be specialized: Triton compiles another variant for a number that
# is 1 or a multiple of 16, and for a pointer aligned to 16 bytes, as a slice of a table sometimes is.
PER_STEP: dict[str, list[str]] = {
    "do_not_specialize": ["num_splits", "table_stride_b"],
    "do_not_specialize_on_alignment": ["page_table_ptr", "query_start_ptr", "context_lens_ptr"],
}


@dataclass(frozen=True, slots=True)
class Partials:
    """The partial results of splits, which `join_splits` combines."""

    o_TNXH: torch.Tensor  # fp32, contiguous
    lse_TNX: torch.Tensor  # fp32, contiguous, log2

    @classmethod
    def empty(cls, like_TNH: torch.Tensor, num_splits: int) -> Partials:
        num_tokens, num_heads, head_dim = like_TNH.shape
        shape = (num_tokens, num_heads, num_splits)
        o_TNXH = torch.empty((*shape, head_dim), dtype=torch.float32, device=like_TNH.device)
        return cls(o_TNXH, torch.empty(shape, dtype=torch.float32, device=like_TNH.device))

    def after(self, num_tokens: int) -> Partials:
        """Returns the partial results without those of the first tokens."""
        return Partials(self.o_TNXH[num_tokens:], self.lse_TNX[num_tokens:])


def choose_splits(num_programs: int, reach: int, tile_bytes: int, device: torch.device) -> int:
    """Returns a number of splits that fills the device with programs, none with too few tokens to be worthwhile.

    `reach` bounds the tokens that a query sees; a program holds `tile_bytes` of the context in shared memory at once.
    """
    wanted = round(num_resident(tile_bytes, device) / num_programs)
    return max(1, min(wanted, reach // MIN_SPLIT_TOKENS, MAX_SPLITS))


def num_resident(tile_bytes: int, device: torch.device) -> int:
    """Returns how many programs that hold `tile_bytes` of shared memory each the device computes at once."""
    return max(1, min(_SHARED_BYTES // tile_bytes, _MAX_RESIDENT)) * common.num_multiprocessors(device)


def join_splits(partials: Partials, o_TNH: torch.Tensor) -> None:
    """Writes the joined partial results into `o_TNH`, last stride 1; zeros where no split has a token."""
    num_tokens, num_heads, head_dim = o_TNH.shape
    num_splits = partials.lse_TNX.shape[2]
    padded, splits_padded = next_power_of_2(head_dim), next_power_of_2(num_splits)
    _join_kernel[(num_tokens, num_heads)](
        partials.o_TNXH, partials.lse_TNX, o_TNH, o_TNH.stride(0), o_TNH.stride(1), num_splits,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=padded,
        SPLITS_PADDED=splits_padded, num_warps=min(8, max(1, padded * splits_padded // 1024)),
    )  # fmt: skip


@triton.jit
def split_of(begin, end, split, num_splits, TILE: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """Returns a split's range of [begin, end). The number of splits suits the longest context; in shorter ones each
    split with tokens has at least MIN_TOKENS, and the others have none."""
    tiles = tl.cdiv(end - begin, TILE)
    length = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TOKENS // TILE) * TILE
    first = begin + split * length
    return first, tl.minimum(first + length, end)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["partial_lse_ptr"])
def _join_kernel(
    partial_o_ptr,  # fp32 [T, N, X, H] contiguous
    partial_lse_ptr,  # fp32 [T, N, X] contiguous, log2
    o_ptr,  # [T, N, H], last stride 1
    o_stride_t,
    o_stride_n,
    num_splits,  # X
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):  # grid: (T, N)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split_X = tl.arange(0, SPLITS_PADDED)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)
    row_X = (token * NUM_HEADS + head) * num_splits + split_X
    lse_X = tl.load(partial_lse_ptr + row_X, mask=split_X < num_splits, other=float("-inf"))
    has_X = lse_X > float("-inf")
    largest = tl.max(lse_X, 0)
    weight_X = tl.exp2(lse_X - tl.where(largest > float("-inf"), largest, 0.0))
    o_mask_XH = has_X[:, None] & (dim_H < HEAD_DIM)[None, :]
    o_XH = tl.load(partial_o_ptr + row_X[:, None] * HEAD_DIM + dim_H[None, :], mask=o_mask_XH, other=0.0)
    total = tl.sum(weight_X, 0)
    o_H = tl.sum(o_XH * weight_X[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        o_ptr + token * o_stride_t + head * o_stride_n + dim_H, o_H.to(o_ptr.dtype.element_ty), mask=dim_H < HEAD_DIM
    )
