"""Multiplies with quantized weights on a GPU (Triton), decoding codes where they are multiplied.

A program multiplies a tile of rows with a tile of outputs. Codes are read as they are stored, in a half or a quarter of
bf16's bytes, since reading them bounds a product of few rows. In registers `(code - zero) * scale` is rounded to the
rows' dtype, so a product has the bits of one with the dequantized weight, which is its reference. On Hopper, fp8
weights with one scale per row go to the tensor cores as they are (`Fp8Product`); rows are then quantized too, each by
its own largest value, as those checkpoints are made for.

With few rows several programs share a tile's inputs (`gemm_launch`). Each stores the sum of its part, and the last to
arrive adds all parts in their order, so the result does not depend on which one that is.

Shapes: `T` rows, `O` out, `I` in, `G` groups of inputs that share a scale; a tile is `M` rows by `N` outputs, `K` deep;
`P` parts of the inputs.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton import common
from engine.kernels.triton.common import cdiv, dot_type
from engine.kernels.triton.products.gemm_launch import NARROW, choose_launch
from engine.kernels.triton.products.quantize_rows import quantize_rows
from engine.weights.quantized_weight import QuantizedWeight

_DEPTHS = (64, 32)  # inputs of a tile, which must lie in one group
_FP8_MULTIPLE = 16  # of both sides, for cuBLAS
_HOPPER = (9, 0)


def fits(weight: QuantizedWeight) -> bool:
    """Returns whether these kernels can multiply with the weight as it is."""
    return weight.group_I is None and _depth(weight) is not None


def make_product(weight: QuantizedWeight, bias_O: torch.Tensor | None) -> QuantizedGemm | Fp8Product:
    """Returns the fastest product with the weight, on the weight's device."""
    by_rows = weight.kind == "fp8" and weight.scales_OG.shape[1] == 1 and weight.zeros_OG is None
    aligned = not weight.shape[0] % _FP8_MULTIPLE and not weight.shape[1] % _FP8_MULTIPLE
    if by_rows and aligned and weight.device.type == "cuda" and torch.cuda.get_device_capability() >= _HOPPER:
        return Fp8Product(weight, bias_O)
    return QuantizedGemm(weight, bias_O)


class Fp8Product:
    """Computes `x_TI @ values.T + bias_O` in fp8; both sides have a scale per row.

    Sums stay in the tensor cores (`use_fast_accum`), which keep fewer bits than fp32: by far less of an error than that
    of the codes, and without the additions in registers that otherwise limit a Hopper's fp8 products.
    """

    def __init__(self, weight: QuantizedWeight, bias_O: torch.Tensor | None) -> None:
        self._codes_IO = weight.codes_OI.contiguous().T  # cuBLAS takes contiguous columns
        self._scales_1O = weight.scales_OG.T.contiguous()
        self._bias_O = bias_O

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        codes_TI, scales_T = quantize_rows(x_TI)
        out_TO = torch._scaled_mm(
            codes_TI, self._codes_IO, scale_a=scales_T[:, None], scale_b=self._scales_1O, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
        out_TO = out_TO.to(x_TI.dtype)
        return out_TO if self._bias_O is None else out_TO + self._bias_O


class QuantizedGemm:
    """Computes `x_TI @ values.T + bias_O`, summed in fp32. Calls must follow each other on the device."""

    def __init__(self, weight: QuantizedWeight, bias_O: torch.Tensor | None) -> None:
        depth = _depth(weight)
        if weight.group_I is not None or depth is None:
            raise ValueError(f"quantized_gemm: groups of {weight.group_size} inputs in {weight.shape}; see `fits`")
        self._depth, self._kind, self._bias_O = depth, weight.kind, bias_O
        self._width_out, self._width_in = weight.shape
        self._codes = _pack(weight.codes_OI, depth) if weight.kind == "int4" else weight.codes_OI.contiguous()
        self._scales_GO = weight.scales_OG.T.contiguous()  # the values that a program reads are adjacent
        self._zeros_GO = None if weight.zeros_OG is None else weight.zeros_OG.T.contiguous()
        self._group_size = weight.shape[1] if weight.scales_OG.shape[1] == 1 else weight.group_size
        # Programs that have stored their part, for each tile of outputs; 0 between calls.
        self._arrived_N = torch.zeros(cdiv(self._width_out, NARROW), dtype=torch.int32, device=weight.device)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if x_TI.dim() != 2 or x_TI.shape[1] != self._width_in or x_TI.stride(1) != 1:
            raise ValueError(
                f"quantized_gemm: x_TI is {tuple(x_TI.shape)} with strides {x_TI.stride()}; expected [T, "
                f"{self._width_in}], the last dense"
            )
        num_rows = x_TI.shape[0]
        out_TO = torch.empty((num_rows, self._width_out), dtype=x_TI.dtype, device=x_TI.device)
        if num_rows == 0:
            return out_TO
        tile_bytes = NARROW * self._depth * self._codes.shape[1] // self._width_in
        launch = choose_launch(
            num_rows,
            self._width_out,
            self._width_in // self._depth,
            tile_bytes,
            common.num_multiprocessors(x_TI.device),
        )
        sums_PTO = out_TO
        if launch.parts > 1:
            sums_PTO = torch.empty((launch.parts, *out_TO.shape), dtype=torch.float32, device=x_TI.device)
        bias = self._scales_GO if self._bias_O is None else self._bias_O
        zeros = self._scales_GO if self._zeros_GO is None else self._zeros_GO
        _gemm_kernel[(cdiv(num_rows, launch.tile_m), cdiv(self._width_out, launch.tile_n), launch.parts)](
            x_TI, self._codes, self._scales_GO, zeros, bias, out_TO, sums_PTO, self._arrived_N, num_rows,
            x_TI.stride(0), self._codes.stride(0), out_TO.stride(0),
            WIDTH_IN=self._width_in, WIDTH_OUT=self._width_out, GROUP=self._group_size,
            HALVES=self._kind == "int4", HAS_ZEROS=self._zeros_GO is not None, HAS_BIAS=self._bias_O is not None,
            TILE_M=launch.tile_m, TILE_N=launch.tile_n, TILE_K=self._depth, PARTS=launch.parts,
            DOT_TYPE=dot_type(x_TI.dtype), num_warps=launch.num_warps, num_stages=4,
        )  # fmt: skip
        return out_TO


def _depth(weight: QuantizedWeight) -> int | None:
    inputs = weight.shape[1]
    group = inputs if weight.scales_OG.shape[1] == 1 else weight.group_size
    return next((depth for depth in _DEPTHS if group % depth == 0 and inputs % depth == 0), None)


def _pack(codes_OI: torch.Tensor, depth: int) -> torch.Tensor:
    """Packs two codes of a tile in a byte, [O, I / 2]: the codes of its first half of inputs in the lower four bits."""
    halves = codes_OI.view(torch.uint8).unflatten(1, (-1, 2, depth // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


@triton.jit
def _values(code_KN, scale_N, zero_N, DOT_TYPE: tl.constexpr, ROUND_TYPE: tl.constexpr):
    return ((code_KN.to(tl.float32) - zero_N[None, :]) * scale_N[None, :]).to(ROUND_TYPE).to(DOT_TYPE)


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    x_ptr,  # [T, I], last stride 1
    codes_ptr,  # int8 or e4m3 [O, I], or bytes of two codes [O, I / 2]; last stride 1
    scales_ptr,  # fp32 [G, O], contiguous
    zeros_ptr,  # the same; read only with HAS_ZEROS
    bias_ptr,  # [O]; read only with HAS_BIAS
    out_ptr,  # [T, O], last stride 1
    sums_ptr,  # fp32 [P, T, O], contiguous; used only with several parts
    arrived_ptr,  # int32, one for each tile of outputs, 0 before and after; used only with several parts
    num_rows,
    x_stride_t,
    codes_stride_o,
    out_stride_t,
    WIDTH_IN: tl.constexpr,
    WIDTH_OUT: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; a multiple of TILE_K
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PARTS: tl.constexpr,  # more than 1 only with a single tile of rows
    DOT_TYPE: tl.constexpr,
):  # grid: (tiles of rows, tiles of outputs, PARTS)
    row_M = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    out_N = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    real_M, real_N = row_M < num_rows, out_N < WIDTH_OUT
    x_M = x_ptr + row_M.to(tl.int64) * x_stride_t
    codes_N = codes_ptr + out_N.to(tl.int64) * codes_stride_o
    sum_MN = tl.zeros([TILE_M, TILE_N], tl.float32)
    zero_N = tl.zeros([TILE_N], tl.float32)
    round_type = x_ptr.dtype.element_ty
    part = tl.program_id(2)
    num_steps: tl.constexpr = WIDTH_IN // TILE_K
    begin = 0 if PARTS == 1 else part * num_steps // PARTS * TILE_K
    end = WIDTH_IN if PARTS == 1 else (part + 1) * num_steps // PARTS * TILE_K
    for start in range(begin, end, TILE_K):
        group_N = start // GROUP * WIDTH_OUT + out_N
        scale_N = tl.load(scales_ptr + group_N, mask=real_N, other=0.0)
        if HAS_ZEROS:
            zero_N = tl.load(zeros_ptr + group_N, mask=real_N, other=0.0)
        if HALVES:
            half_K = tl.arange(0, TILE_K // 2)
            pair_KN = tl.load(codes_N[None, :] + start // 2 + half_K[:, None], mask=real_N[None, :], other=0)
            first_MK = tl.load(x_M[:, None] + start + half_K[None, :], mask=real_M[:, None], other=0.0)
            second_MK = tl.load(x_M[:, None] + start + TILE_K // 2 + half_K[None, :], mask=real_M[:, None], other=0.0)
            low_KN = _values(pair_KN & 15, scale_N, zero_N, DOT_TYPE, round_type)
            high_KN = _values(pair_KN >> 4, scale_N, zero_N, DOT_TYPE, round_type)
            sum_MN += tl.dot(first_MK.to(DOT_TYPE), low_KN, input_precision="ieee")
            sum_MN += tl.dot(second_MK.to(DOT_TYPE), high_KN, input_precision="ieee")
        else:
            in_K = start + tl.arange(0, TILE_K)
            code_KN = tl.load(codes_N[None, :] + in_K[:, None], mask=real_N[None, :], other=0.0)
            x_MK = tl.load(x_M[:, None] + in_K[None, :], mask=real_M[:, None], other=0.0)
            value_KN = _values(code_KN, scale_N, zero_N, DOT_TYPE, round_type)
            sum_MN += tl.dot(x_MK.to(DOT_TYPE), value_KN, input_precision="ieee")
    if PARTS > 1:
        place_MN = row_M[:, None].to(tl.int64) * WIDTH_OUT + out_N[None, :]
        part_size = num_rows.to(tl.int64) * WIDTH_OUT
        real_MN = real_M[:, None] & real_N[None, :]
        tl.store(sums_ptr + part * part_size + place_MN, sum_MN, mask=real_MN)
        tl.debug_barrier()  # all threads have stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tl.program_id(1), 1, sem="acq_rel") < PARTS - 1:
            return
        sum_MN = tl.zeros([TILE_M, TILE_N], tl.float32)
        for each in range(PARTS):
            part_MN = sums_ptr + each * part_size + place_MN
            sum_MN += tl.load(part_MN, mask=real_MN, other=0.0, cache_modifier=".cg")
        tl.store(arrived_ptr + tl.program_id(1), 0)
    if HAS_BIAS:
        sum_MN += tl.load(bias_ptr + out_N, mask=real_N, other=0.0).to(tl.float32)[None, :]
    out_MN = out_ptr + row_M[:, None].to(tl.int64) * out_stride_t + out_N[None, :]
    tl.store(out_MN, sum_MN.to(out_ptr.dtype.element_ty), mask=real_M[:, None] & real_N[None, :])
