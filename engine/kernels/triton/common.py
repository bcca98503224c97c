"""Computes what the wrappers of several Triton kernels need on the host before a launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_type(dtype: torch.dtype, stored: torch.dtype | None = None) -> tl.dtype:
    """Returns the type in which a kernel multiplies matrices of `dtype`.

    It is the dtype's own, except under Triton's interpreter, which keeps bf16 as bits and would multiply those. With
    operands `stored` in 8 bits it is fp16, which represents every int8 and e4m3 exactly; a Hopper converts two of them
    to fp16 in one instruction, which it cannot do for bf16.
    """
    if stored is not None and stored.itemsize == 1 and dtype != torch.float32:
        return tl.float16
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return _TYPES[dtype]


# Triton's own functions for these, which kernels can call too, take 7 us a call on the host (3.9, 2026-11), and a step
# makes some hundred calls.
def cdiv(number: int, divisor: int) -> int:
    """Divides and rounds up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the least power of 2 that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def launches_early(device: torch.device) -> bool:
    """Returns whether the device can begin a kernel while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
