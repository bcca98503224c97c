"""Represents a quantized weight in the same way for every stored layout: codes, scales and zero points.

`engine.weights.unpack_quantized` makes it from a checkpoint, `quantize_weight` from plain values.
`engine.layers.linear` multiplies with it; if the machine has no kernel for that, `engine.weights.reader` dequantizes
it.

Shapes: `O` outputs, `I` inputs, `G` groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.weights.quantization_config import Activations, int4_group
from penstock.errors import CheckpointError

Kind = Literal["int4", "int8", "fp8"]
_FP8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Represents the values `(code - zero) * scale`."""

    kind: Kind
    codes_OI: torch.Tensor  # int8 (int4: 0 to 15, int8: -128 to 127) or float8_e4m3fn
    scales_OG: torch.Tensor  # float32
    zeros_OG: torch.Tensor | None = None  # float32; None: all 0
    group_size: int = 0  # inputs of a group; the last group may have fewer
    group_I: torch.Tensor | None = None  # int64: each input's group, where groups are not runs of adjacent inputs
    activations: Activations | None = None  # what the product's inputs are quantized to, each token with its scale
    has_kernel: bool = True  # with `activations`: False if the product is computed in plain torch

    @property
    def shape(self) -> torch.Size:
        return self.codes_OI.shape

    @property
    def device(self) -> torch.device:
        return self.codes_OI.device

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values [O, I], computed in float32 (in float64 for float64) and rounded once."""
        values_OI = self.codes_OI.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if self.zeros_OG is not None:
            values_OI -= self._spread(self.zeros_OG)
        return (values_OI * self._spread(self.scales_OG)).to(dtype)

    def narrow(self, dim: int, start: int, length: int) -> QuantizedWeight:
        """Returns a part of the outputs (`dim` 0) or of the inputs (`dim` 1), as `torch.Tensor.narrow` does."""
        if dim == 0:
            rows = slice(start, start + length)
            zeros = None if self.zeros_OG is None else self.zeros_OG[rows]
            return replace(self, codes_OI=self.codes_OI[rows], scales_OG=self.scales_OG[rows], zeros_OG=zeros)
        codes_OI = self.codes_OI[:, start : start + length]
        if self.scales_OG.shape[1] == 1:
            return replace(self, codes_OI=codes_OI, group_size=length)
        if self.group_I is None and start % self.group_size == 0:
            groups = slice(start // self.group_size, -(-(start + length) // self.group_size))
            zeros = None if self.zeros_OG is None else self.zeros_OG[:, groups]
            return replace(self, codes_OI=codes_OI, scales_OG=self.scales_OG[:, groups], zeros_OG=zeros)
        return replace(self, codes_OI=codes_OI, group_I=self._groups()[start : start + length])

    def take_rows(self, rows_O: torch.Tensor) -> QuantizedWeight:
        """Returns the given outputs, in that order."""
        return replace(
            self,
            codes_OI=self.codes_OI.view(torch.uint8)[rows_O].view(self.codes_OI.dtype),
            scales_OG=self.scales_OG[rows_O],
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[rows_O],
        )

    def to(self, device: torch.device) -> QuantizedWeight:
        return replace(
            self,
            codes_OI=self.codes_OI.to(device),
            scales_OG=self.scales_OG.to(device),
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG.to(device),
            group_I=None if self.group_I is None else self.group_I.to(device),
        )

    def _groups(self) -> torch.Tensor:
        if self.group_I is not None:
            return self.group_I
        return torch.arange(self.shape[1], device=self.device) // self.group_size

    def _spread(self, values_OG: torch.Tensor) -> torch.Tensor:
        """Repeats each group's value for its inputs."""
        return values_OG if values_OG.shape[1] == 1 else values_OG[:, self._groups()]


Weight = torch.Tensor | QuantizedWeight


def stack_rows(weights: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Concatenates the outputs of all weights. The result is plain, in `dtype`, unless all are quantized alike.

    Raises CheckpointError for weights that differ in whether their inputs are quantized, which no product can be."""
    if all(isinstance(weight, torch.Tensor) for weight in weights):
        return join([weight for weight in weights if isinstance(weight, torch.Tensor)])
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    first = quantized[0]
    alike = len(quantized) == len(weights) and all(
        (part.kind, part.group_size, part.scales_OG.shape[1])
        == (first.kind, first.group_size, first.scales_OG.shape[1])
        and part.group_I is None
        for part in quantized
    )
    if len({weight.activations if isinstance(weight, QuantizedWeight) else None for weight in weights}) > 1:
        raise CheckpointError(
            "some projections that are computed in one product have quantized inputs and others do not; give a "
            "checkpoint that quantizes q, k and v alike, and gate and up alike"
        )
    if not alike:
        return torch.cat([as_plain(weight, dtype) for weight in weights])
    zeros: torch.Tensor | None = None
    if any(part.zeros_OG is not None for part in quantized):
        zeros = torch.cat([torch.zeros_like(p.scales_OG) if p.zeros_OG is None else p.zeros_OG for p in quantized])
    codes = torch.cat([part.codes_OI.view(torch.uint8) for part in quantized]).view(first.codes_OI.dtype)
    return replace(first, codes_OI=codes, scales_OG=torch.cat([part.scales_OG for part in quantized]), zeros_OG=zeros)


def join(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenates tensors. For meta tensors it avoids `torch.cat`, which would spend a second on imports."""
    if parts[0].is_meta:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat(list(parts), dim=dim)


def take_rows(weight: Weight, rows_O: torch.Tensor) -> Weight:
    """Returns the weight's outputs in the given order."""
    if isinstance(weight, QuantizedWeight):
        return weight.take_rows(rows_O.to(weight.device))
    return in_order(weight, rows_O)


def in_order(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns the values of the first dimension in the given order. A meta tensor stays as it is."""
    return values if values.is_meta else values[order.to(values.device)]


def as_plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def quantize_weight(weight_OI: torch.Tensor, kind: Kind) -> QuantizedWeight:
    """Rounds plain values to the nearest codes. int8 and fp8 get one scale per row; int4 gets a scale and a zero point
    for each group of `int4_group` inputs."""
    exact = weight_OI.float()
    if kind == "int4":
        return _quantize_to_four_bits(exact)
    largest = 127.0 if kind == "int8" else _FP8_LARGEST
    scales_O1 = exact.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / largest
    scaled = (exact / scales_O1).clamp_(-largest, largest)
    codes = scaled.round_().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return QuantizedWeight(kind, codes, scales_O1, None, weight_OI.shape[1])


def _quantize_to_four_bits(exact_OI: torch.Tensor) -> QuantizedWeight:
    outputs, inputs = exact_OI.shape
    size = int4_group(inputs)
    groups = exact_OI.view(outputs, -1, size)
    low = groups.amin(dim=2).clamp_(max=0)
    high = groups.amax(dim=2).clamp_(min=0)
    scales_OG = ((high - low) / 15).clamp_(min=1e-12)
    zeros_OG = (-low / scales_OG).round_()
    codes = (groups / scales_OG[..., None] + zeros_OG[..., None]).round_().clamp_(0, 15)
    return QuantizedWeight("int4", codes.to(torch.int8).view(outputs, inputs), scales_OG, zeros_OG, size)
