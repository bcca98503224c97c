"""Normalises rows by their root mean square, optionally after adding a residual (Triton; Zhang and Sennrich 2019,
arXiv:1910.07467).

A program reads its rows once and writes them once; narrow rows (heads) share a program. Computes in fp32. From compute
capability 9.0 on it is launched while the kernel before it ends, and reads the weight before it waits for the rows
(programmatic dependent launch). Reference: `rms_norm` and `add_rms_norm` of `engine.kernels.layer_ops.TorchOps`.

Shapes: `T` tokens, `N` rows of a token, `D` values of a row, `R` rows of a program.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton import common
from engine.kernels.triton.common import cdiv, next_power_of_2

_VALUES = 2048  # of a program, where rows are narrow
_MAX_WIDTH = 65536  # of a row: registers hold it whole


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns a new tensor of x's shape, [T, D] or [T, N, D] with last stride 1."""
    _check("rms_norm", x, weight_D)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight_D, out, eps, has_residual=False)
    return out


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of the sum, the sum), in the memory of `x_TD` and `residual_TD`, both contiguous."""
    _check("add_rms_norm", x_TD, weight_D)
    if residual_TD.shape != x_TD.shape or residual_TD.dtype != x_TD.dtype:
        raise ValueError(
            f"add_rms_norm: residual_TD is {residual_TD.dtype} {tuple(residual_TD.shape)}, x_TD {x_TD.dtype} "
            f"{tuple(x_TD.shape)}"
        )
    if x_TD.dim() != 2 or not x_TD.is_contiguous() or not residual_TD.is_contiguous():
        raise ValueError("add_rms_norm: x_TD and residual_TD must be contiguous [T, D]")
    _launch(x_TD, residual_TD, weight_D, x_TD, eps, has_residual=True)
    return x_TD, residual_TD


def _check(operation: str, x: torch.Tensor, weight_D: torch.Tensor) -> None:
    width = x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or not 1 <= width <= _MAX_WIDTH:
        raise ValueError(
            f"{operation}: x has shape {tuple(x.shape)}, strides {x.stride()}; expected [T, D] or [T, N, D], the last "
            f"dense, D up to {_MAX_WIDTH}"
        )
    if weight_D.shape != (width,) or weight_D.device != x.device or weight_D.stride(0) != 1:
        raise ValueError(
            f"{operation}: weight_D has shape {tuple(weight_D.shape)} on {weight_D.device}; expected ({width},) on "
            f"{x.device}"
        )


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, has_residual: bool
) -> None:
    width, per_token = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * per_token
    if num_rows == 0:
        return
    padded = next_power_of_2(width)
    rows = max(1, _VALUES // padded)
    early = common.launches_early(x.device)
    _norm_kernel[(cdiv(num_rows, rows),)](
        x, residual, weight, out, num_rows, eps, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
        PER_TOKEN=per_token, WIDTH=width, WIDTH_PADDED=padded, ROWS=rows, HAS_RESIDUAL=has_residual, IS_EARLY=early,
        num_warps=min(16, max(1, rows * padded // 512)), launch_pdl=early,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,  # [T, N, D], last stride 1
    residual_ptr,  # [T, D] contiguous, receives the sum; used only with HAS_RESIDUAL
    weight_ptr,  # [D]
    out_ptr,  # [T, N, D] contiguous
    num_rows,  # T * N
    eps,
    x_stride_t,
    x_stride_n,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EARLY: tl.constexpr,  # the kernel before this one may still write the rows
):  # grid: (groups of R rows,)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value_D = tl.arange(0, WIDTH_PADDED)
    mask_RD = (row_R < num_rows)[:, None] & (value_D < WIDTH)[None, :]
    x_place_R = row_R // PER_TOKEN * x_stride_t + row_R % PER_TOKEN * x_stride_n
    weight_D = tl.load(weight_ptr + value_D, mask=value_D < WIDTH, other=0.0).to(tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # those wait in turn for the end of this one
    x_RD = tl.load(x_ptr + x_place_R[:, None] + value_D[None, :], mask=mask_RD, other=0.0)
    place_RD = row_R[:, None] * WIDTH + value_D[None, :]
    if HAS_RESIDUAL:
        residual_RD = tl.load(residual_ptr + place_RD, mask=mask_RD, other=0.0)
        x_RD = (x_RD.to(tl.float32) + residual_RD.to(tl.float32)).to(x_ptr.dtype.element_ty)  # rounded as it is stored
        tl.store(residual_ptr + place_RD, x_RD, mask=mask_RD)
    x_RD = x_RD.to(tl.float32)
    inverse_R = tl.rsqrt(tl.sum(x_RD * x_RD, 1) / WIDTH + eps)
    out_RD = x_RD * inverse_R[:, None] * weight_D[None, :]
    tl.store(out_ptr + place_RD, out_RD.to(out_ptr.dtype.element_ty), mask=mask_RD)
