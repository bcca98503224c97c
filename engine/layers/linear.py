"""Implements linear layers whose weights are laid out for the machine they run on, single or one for each expert.

On a CPU a bf16 weight is packed for the kernels of `engine.cpu.linear`; what they do not take is packed once for oneDNN
(a third faster than a plain product at batch 1-64 on AVX-512, measured 2026-11). Everywhere else the layer is an
ordinary matrix product.

Shapes: `T` tokens, `I` in, `O` out, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.cpu import int8_products
from engine.cpu.linear import CodesLayout, can_pack_codes, pack_for_tiles
from engine.kernels.kv_quantization import reads_e4m3
from engine.kernels.layer_ops import Product
from engine.weights.quantized_weight import QuantizedWeight, Weight, as_plain, in_order, join, stack_rows, take_rows
from penstock.errors import CheckpointError


class LayerTensors(Protocol):
    """Reads a layer's tensors by name."""

    def __call__(self, name: str) -> torch.Tensor: ...

    def weight(self, name: str, is_expert: bool = False) -> Weight:
        """Returns the weight of a matrix product, quantized where `can_multiply` holds for it."""
        ...

    def multipliable(self, quantized: QuantizedWeight, is_expert: bool = False) -> Weight:
        """Returns the weight as it is where `can_multiply` holds for it, and else its values."""
        ...


class QuantizedProduct(Protocol):
    """`x_TI @ values.T + bias_O` on a GPU."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...


class Linear:
    """`y_TO = x_TI @ weight_OI.T + bias_O`."""

    def __init__(self, weight_OI: Weight, bias_O: torch.Tensor | None = None) -> None:
        """Lays out the weight. `can_multiply` must hold for a quantized one, or on a CPU its inputs be quantized."""
        is_packable = not isinstance(weight_OI, QuantizedWeight) or weight_OI.has_kernel
        self.tiles = pack_for_tiles(weight_OI, bias_O) if weight_OI.device.type == "cpu" and is_packable else None
        self._bias_O = bias_O if self.tiles is None else None
        self._packed: torch.Tensor | None = None
        self._weight_OI: torch.Tensor | None = None
        self._quantized: QuantizedProduct | None = None
        self._integers: QuantizedWeight | None = None
        if isinstance(weight_OI, QuantizedWeight):
            if self.tiles is None and weight_OI.activations is not None and weight_OI.device.type == "cpu":
                self._integers = weight_OI
            elif self.tiles is None:
                self._quantized = _quantized_product(weight_OI, bias_O)
        elif self.tiles is None:
            self._packed = _pack(weight_OI)
            self._weight_OI = weight_OI.contiguous() if self._packed is None else None

    @property
    def is_row_exact(self) -> bool:
        """Returns whether a row's result has the same bits whatever rows are computed with it."""
        return self.tiles is not None or self._integers is not None

    @property
    def layout(self) -> dict[str, Any]:
        """The layout of the weight, as JSON values that `apply_layout` takes."""
        if self._integers is not None:
            return {"kind": "integers", **_blank_fields(self._integers)}
        kind = "tiles" if self.tiles is not None else "packed" if self._packed is not None else "plain"
        codes = self.tiles.codes if self.tiles is not None else None
        return {"kind": kind} | ({} if codes is None else {"codes": asdict(codes)})

    def apply_layout(self, layout: Mapping[str, Any]) -> None:
        """Lays out a layer that was made from a meta tensor like another replica's layer, whose tensors it will get."""
        weight_OI = self._weight_OI
        assert weight_OI is not None
        assert weight_OI.is_meta
        if layout["kind"] == "tiles":
            codes = CodesLayout(**layout["codes"]) if "codes" in layout else None
            self.tiles = pack_for_tiles(weight_OI, self._bias_O, codes)
            self._weight_OI = self._bias_O = None
        elif layout["kind"] == "packed":
            self._packed, self._weight_OI = weight_OI, None
        elif layout["kind"] == "integers":
            self._integers, self._weight_OI = _blank_integers(weight_OI, layout), None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.tiles is not None:
            return self.tiles(x_TI)
        if self._integers is not None:
            return int8_products.multiply(x_TI, self._integers, self._bias_O)
        if self._quantized is not None:
            return self._quantized(x_TI)
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")
        assert self._weight_OI is not None
        return F.linear(x_TI, self._weight_OI, self._bias_O)


def _blank_fields(weight: QuantizedWeight) -> dict[str, Any]:
    """Returns what `_blank_integers` needs besides the weight's shape, as JSON values."""
    return {
        "weight_kind": weight.kind,
        "num_groups": weight.scales_OG.shape[1],
        "group_size": weight.group_size,
        "has_zeros": weight.zeros_OG is not None,
        "activations": weight.activations,
    }


def _blank_integers(weight_OI: torch.Tensor, layout: Mapping[str, Any]) -> QuantizedWeight:
    """Returns a quantized weight of meta tensors with the shape of another meta tensor."""
    scales_OG = weight_OI.new_empty((weight_OI.shape[0], layout["num_groups"]), dtype=torch.float32)
    return QuantizedWeight(
        layout["weight_kind"],
        torch.empty_like(weight_OI, dtype=torch.int8),
        scales_OG,
        torch.empty_like(scales_OG) if layout["has_zeros"] else None,
        layout["group_size"],
        activations=layout["activations"],
        has_kernel=False,
    )


def can_multiply(weight: QuantizedWeight, dtype: torch.dtype, is_expert: bool = False) -> bool:
    """Returns whether the machine has a kernel for this weight as it is. Otherwise it must be dequantized first or, if
    its inputs are quantized, marked as having no kernel.

    CPUs need the kernels of `engine.cpu`: torch's own for quantized weights are 1.3 to 1.9 times faster than bf16 at
    one row, but 5 to 15 times slower from 16 rows on (2026-11, torch 2.13).
    """
    if weight.device.type == "cpu":
        return dtype == torch.bfloat16 and can_pack_codes(weight)
    if dtype == torch.float32 or (is_expert and not _can_group(weight)):
        return False
    if weight.kind == "fp8" and not reads_e4m3(weight.device):
        return False
    try:
        from engine.kernels.triton.products.quantized_gemm import fits
    except ImportError:  # no Triton
        return False
    return fits(weight)


def _can_group(weight: QuantizedWeight) -> bool:
    """Returns whether the single launch of a layer's experts takes the weight: fp8 in groups of equal length."""
    num_groups = weight.scales_OG.shape[1]
    is_even = num_groups == 1 or num_groups * weight.group_size == weight.shape[1]
    return weight.kind == "fp8" and weight.zeros_OG is None and is_even


def _quantized_product(weight: QuantizedWeight, bias_O: torch.Tensor | None) -> QuantizedProduct:
    from engine.kernels.triton.products.quantized_gemm import make_product

    return make_product(weight, bias_O)


def fuse(read: LayerTensors, paths: Sequence[str], has_bias: bool, rows_O: torch.Tensor | None = None) -> Linear:
    """Returns one layer for several products with the same input, their outputs concatenated, or in the order of
    `rows_O`."""
    weights = [read.weight(f"{path}.weight") for path in paths]
    plain = next((weight.dtype for weight in weights if isinstance(weight, torch.Tensor)), torch.bfloat16)
    weight = stack_rows(weights, plain)
    bias_O = join([read(f"{path}.bias") for path in paths]) if has_bias else None
    if rows_O is not None:
        weight = take_rows(weight, rows_O)
        bias_O = None if bias_O is None else in_order(bias_O, rows_O)
    return Linear(weight, bias_O)


class GroupedLinear:
    """A weight for each expert, all of the same shape; `LayerOps.grouped_gemm` multiplies with them."""

    def __init__(self, num_experts: int, read: Callable[[int], Weight]) -> None:
        """`read` returns an expert's weight, [O, I]; at most one weight is in memory twice."""
        first = read(0)
        self.weight_EOI: torch.Tensor | None = None
        self.scales_EGO: torch.Tensor | None = None
        if first.device.type in ("cpu", "meta"):  # each is packed separately
            self.experts: tuple[Product, ...] = (
                Linear(first),
                *(Linear(read(expert)) for expert in range(1, num_experts)),
            )
            return
        if isinstance(first, QuantizedWeight):
            self._stack_codes(num_experts, read, first)
            return
        self.weight_EOI = first.new_empty((num_experts, *first.shape))
        for expert in range(num_experts):
            self.weight_EOI[expert] = first if expert == 0 else as_plain(read(expert), first.dtype)
        self.experts = tuple(Linear(weight_OI) for weight_OI in self.weight_EOI)  # views

    def _stack_codes(self, num_experts: int, read: Callable[[int], Weight], first: QuantizedWeight) -> None:
        """Keeps fp8 weights as they are. Raises CheckpointError if one is stored otherwise than the first."""
        codes_EOI = first.codes_OI.new_empty((num_experts, *first.shape))
        num_groups = first.scales_OG.shape[1]
        scales_EGO = first.scales_OG.new_empty((num_experts, num_groups, first.shape[0]))
        parts = []
        for expert in range(num_experts):
            weight = first if expert == 0 else read(expert)
            if not isinstance(weight, QuantizedWeight) or weight.scales_OG.shape != first.scales_OG.shape:
                raise CheckpointError(
                    f"expert {expert} of a layer is not stored in fp8 with {num_groups} scales a row as expert 0 is; "
                    "give a checkpoint that stores all experts of a layer alike"
                )
            codes_EOI[expert].view(torch.uint8).copy_(weight.codes_OI.view(torch.uint8))
            scales_EGO[expert].copy_(weight.scales_OG.T)
            parts.append(replace(first, codes_OI=codes_EOI[expert], scales_OG=scales_EGO[expert].T))
        self.weight_EOI, self.scales_EGO = codes_EOI, scales_EGO
        self.experts = tuple(partial(_multiply_dequantized, part) for part in parts)


def _multiply_dequantized(weight: QuantizedWeight, x_TI: torch.Tensor) -> torch.Tensor:
    """Multiplies where there is no Triton; dequantizes the weight each time."""
    return F.linear(x_TI, weight.dequantize(x_TI.dtype))


def _pack(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Returns the weight in oneDNN's own layout, or None if it has none for this device and dtype."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight_OI.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    if weight_OI.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
