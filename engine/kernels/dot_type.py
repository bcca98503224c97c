"""The type in which a Triton kernel multiplies matrices of a given dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_type(dtype: torch.dtype, stored: torch.dtype | None = None) -> tl.dtype:
    """The dtype's own, except under Triton's interpreter: it keeps bf16 as bits and would multiply those.

    With operands `stored` in 8 bits it is fp16, which holds every int8 and e4m3 exactly and which a Hopper converts
    them to in one instruction for two, as it does not to bf16.
    """
    if stored is not None and stored.itemsize == 1 and dtype != torch.float32:
        return tl.float16
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return _TYPES[dtype]
