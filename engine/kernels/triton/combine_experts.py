"""Sums the outputs of each token's experts (Triton), read from the places where the grouped product left them.

A token's outputs are added in the order in which its experts were chosen, whatever the batch. Those of other ranks'
experts are not read. Reference: `combine_experts` in `engine.kernels.expert_routing`.

Shapes: `T` tokens, `X` pairs, `C` experts of a token, `D` hidden.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.expert_routing import Routing
from engine.kernels.triton.common import cdiv, next_power_of_2

_BLOCK = 1024  # values of a token that a program sums


def combine_experts(out_XD: torch.Tensor, routing: Routing, *, is_weighted: bool) -> torch.Tensor:
    """See `LayerOps.combine_experts`; `out_XD` is contiguous."""
    num_tokens, num_chosen = routing.place_TC.shape
    if out_XD.dim() != 2 or out_XD.shape[0] != num_tokens * num_chosen or not out_XD.is_contiguous():
        raise ValueError(
            f"combine_experts: out_XD has shape {tuple(out_XD.shape)}, strides {out_XD.stride()}; expected contiguous "
            f"[{num_tokens * num_chosen}, D]"
        )
    width = out_XD.shape[1]
    out_TD = torch.empty((num_tokens, width), dtype=out_XD.dtype, device=out_XD.device)
    if num_tokens:
        block = min(_BLOCK, next_power_of_2(width))
        _combine_kernel[(num_tokens, cdiv(width, block))](
            out_XD, routing.place_TC, routing.weight_TC, routing.start_E1, out_TD, WIDTH=width, NUM_CHOSEN=num_chosen,
            NUM_OWN=routing.start_E1.shape[0] - 1 if routing.is_partial else 0, IS_WEIGHTED=is_weighted, BLOCK=block,
            num_warps=min(4, max(1, block // 256)),
        )  # fmt: skip
    return out_TD


@triton.jit
def _combine_kernel(
    pairs_ptr,  # [X, D], contiguous
    place_ptr,  # int64 [T, C], contiguous
    weight_ptr,  # fp32 [T, C], contiguous; read only if IS_WEIGHTED
    start_ptr,  # int32 [NUM_OWN + 1]; read only with NUM_OWN
    out_ptr,  # [T, D], contiguous
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_OWN: tl.constexpr,  # experts of this rank; 0: all
    IS_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # grid: (T, ceil(D / BLOCK))
    token = tl.program_id(0).to(tl.int64)
    dim_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sum_D = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        place = tl.load(place_ptr + token * NUM_CHOSEN + number)
        is_real_D = dim_D < WIDTH
        if NUM_OWN:
            is_real_D &= place < tl.load(start_ptr + NUM_OWN)
        value_D = tl.load(pairs_ptr + place * WIDTH + dim_D, mask=is_real_D, other=0.0).to(tl.float32)
        if IS_WEIGHTED:
            value_D *= tl.load(weight_ptr + token * NUM_CHOSEN + number)
        sum_D += value_D
    tl.store(out_ptr + token * WIDTH + dim_D, sum_D.to(out_ptr.dtype.element_ty), mask=dim_D < WIDTH)
