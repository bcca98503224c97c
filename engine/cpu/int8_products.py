"""Computes products whose inputs are quantized to int8, each token with its own scale (W8A8, W4A8), in plain torch.

It is the reference of `engine/cpu/csrc/int8_linear.h`, and serves where those kernels do not: without a compiler, for
float32, and for weights that do not fill whole tiles. Sums of codes are exact integers in both.

Shapes: `T` tokens, `I` in, `O` out, `G` groups of inputs that share a scale.
"""

from __future__ import annotations

import functools

import torch

from engine.weights.quantized_weight import QuantizedWeight

_LARGEST_CODE = 127.0
_EXACT_INPUTS = 1024  # sums of that many products of two bytes are exact in float32, in any order: 2^14 * 2^10 = 2^24
_SMALLEST_ROW = 1e-30  # below it a row counts as zeros: the inverse of its scale would overflow


def quantize_rows(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nearest codes of each row, int8 [T, I], and the rows' scales, float32 [T, 1]: 127 stands for a row's
    largest magnitude. A row that is not finite has a scale that is not a number."""
    exact = x_TI.float()
    top_T1 = exact.abs().amax(dim=1, keepdim=True)
    largest_T1 = torch.full_like(top_T1, _LARGEST_CODE)  # torch divides a number by a tensor with two roundings
    inverse_T1 = torch.where(top_T1 >= _SMALLEST_ROW, largest_T1 / top_T1, 0.0)
    codes_TI = (exact * inverse_T1).round_().nan_to_num_(0.0).to(torch.int8)
    is_finite_T1 = top_T1.isfinite()
    return codes_TI, torch.where(is_finite_T1, top_T1 / _LARGEST_CODE, torch.nan)


def multiply(x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Returns `x_TI @ values.T + bias_O` with the rows of `x_TI` quantized, in the dtype of `x_TI`."""
    codes_TI, scale_T1 = quantize_rows(x_TI)
    total_TO = torch.zeros(len(x_TI), weight.shape[0])
    for group in range(weight.scales_OG.shape[1]):
        inputs = slice(group * weight.group_size, (group + 1) * weight.group_size)
        total_TO += _sums(codes_TI[:, inputs], weight, group, inputs).float() * weight.scales_OG[:, group]
    total_TO *= scale_T1
    return (total_TO if bias_O is None else total_TO + bias_O.float()).to(x_TI.dtype)


def _sums(codes_TI: torch.Tensor, weight: QuantizedWeight, group: int, inputs: slice) -> torch.Tensor:
    """Returns the sums of a group's products, int32 [T, O]."""
    add_products = torch._int_mm if _adds_exactly() else add_in_floats
    sums_TO = add_products(codes_TI.contiguous(), weight.codes_OI[:, inputs].T)
    if weight.zeros_OG is None:
        return sums_TO
    return sums_TO - weight.zeros_OG[:, group].int() * codes_TI.sum(dim=1, keepdim=True, dtype=torch.int32)


def add_in_floats(codes_TI: torch.Tensor, codes_IO: torch.Tensor) -> torch.Tensor:
    """Returns the matrix product of two int8 matrices as `torch._int_mm` should, exact on every processor."""
    sums_TO = torch.zeros((len(codes_TI), codes_IO.shape[1]), dtype=torch.int32)
    for start in range(0, codes_TI.shape[1], _EXACT_INPUTS):
        inputs = slice(start, start + _EXACT_INPUTS)
        sums_TO += (codes_TI[:, inputs].float() @ codes_IO[inputs].float()).int()
    return sums_TO


@functools.cache
def _adds_exactly() -> bool:
    """Returns whether `torch._int_mm` is exact here: on processors without VNNI, oneDNN adds two products of bytes in
    16 bits, which saturate."""
    codes = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(codes, codes) == 127 * 127 * 64).all())
