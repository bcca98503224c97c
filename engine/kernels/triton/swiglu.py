"""Computes silu(gate) * up, or with gelu, from a product that holds both side by side (Triton; Shazeer 2020,
arXiv:2002.05202).

Each value is read once and written once; computes in fp32. Reference: `silu_and_mul` and `gelu_and_mul` of
`engine.kernels.layer_ops.TorchOps`.

Shapes: `T` tokens, `F` intermediate.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.common import cdiv, next_power_of_2

_BLOCK = 1024  # 8 values, 16 bytes of bf16, for each of 128 threads


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor [T, F]; `gate_up_T2F` has last stride 1."""
    return _launch("silu_and_mul", gate_up_T2F, is_gelu=False)


def gelu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor [T, F], with gelu's approximation by tanh; `gate_up_T2F` has last stride 1."""
    return _launch("gelu_and_mul", gate_up_T2F, is_gelu=True)


def _launch(operation: str, gate_up_T2F: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    if gate_up_T2F.dim() != 2 or gate_up_T2F.shape[1] % 2 or gate_up_T2F.stride(1) != 1:
        raise ValueError(
            f"{operation}: gate_up_T2F has shape {tuple(gate_up_T2F.shape)}, strides {gate_up_T2F.stride()}; expected "
            "[T, 2 * F], the last dense"
        )
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if out_TF.numel() == 0:
        return out_TF
    block = min(_BLOCK, next_power_of_2(width))
    _swiglu_kernel[(num_tokens, cdiv(width, block))](
        gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, IS_GELU=is_gelu, BLOCK=block, num_warps=4
    )
    return out_TF


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [T, 2 * F], last stride 1
    out_ptr,  # [T, F] contiguous
    gate_up_stride_t,
    width,  # F
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # grid: (T, blocks of F)
    token = tl.program_id(0).to(tl.int64)
    value_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_F = value_F < width
    gates = gate_up_ptr + token * gate_up_stride_t
    gate_F = tl.load(gates + value_F, mask=mask_F, other=0.0).to(tl.float32)
    up_F = tl.load(gates + width + value_F, mask=mask_F, other=0.0).to(tl.float32)
    slope_F = gate_F
    if IS_GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        slope_F = 1.5957691216057308 * gate_F * (1.0 + 0.044715 * gate_F * gate_F)
    out_F = gate_F / (1.0 + tl.exp(-slope_F)) * up_F
    tl.store(out_ptr + token * width + value_F, out_F.to(out_ptr.dtype.element_ty), mask=mask_F)
