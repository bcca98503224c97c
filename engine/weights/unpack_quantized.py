"""Converts the tensors that a checkpoint stores for a quantized weight to a `QuantizedWeight`.

A 32-bit word holds 8 or 4 codes, the first in the lowest bits. GPTQ packs adjacent inputs of weights and adjacent
outputs of zero points; AWQ packs outputs of both, in its own order; compressed-tensors packs inputs of weights and
outputs of zero points, each shifted to be positive.

Shapes: `O` outputs, `I` inputs, `G` groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.weights.quantization_config import WeightScheme
from engine.weights.quantized_layouts import BITS
from engine.weights.quantized_weight import QuantizedWeight
from penstock.errors import CheckpointError

# The output, of eight adjacent ones, that the i-th four bits of an AWQ word hold.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_HALF = {"int4": 8, "int8": 128}
Tensors = Mapping[str, torch.Tensor]  # by the suffix of the name, behind the path of the product


def unpack(scheme: WeightScheme, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """Unpacks a weight of shape [O, I] from its stored tensors."""
    return replace(_unpack(scheme, tensors, shape), activations=scheme.activations)


def _unpack(scheme: WeightScheme, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    if scheme.layout == "gptq":
        return _unpack_gptq(scheme, tensors, shape)
    if scheme.layout == "awq":
        return _unpack_awq(scheme, tensors, shape)
    if scheme.layout == "packed":
        return _unpack_packed(scheme, tensors, shape)
    return _unpack_codes(scheme, tensors, shape)


def _unpack_gptq(scheme: WeightScheme, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    bits = BITS[scheme.kind]
    codes_IO = _spread_words(tensors["qweight"], bits, dim=0)
    zeros_GO = _spread_words(tensors["qzeros"], bits, dim=1) + scheme.zero_offset
    return _integer_weight(scheme, codes_IO.T, tensors["scales"].T, zeros_GO.T, shape, tensors.get("g_idx"))


def _unpack_awq(scheme: WeightScheme, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    def in_order(words: torch.Tensor) -> torch.Tensor:
        place = torch.tensor(_AWQ_ORDER).argsort()
        return _spread_words(words, 4, dim=1).unflatten(1, (-1, 8))[:, :, place].flatten(1)

    codes_IO, zeros_GO = in_order(tensors["qweight"]), in_order(tensors["qzeros"])
    return _integer_weight(scheme, codes_IO.T, tensors["scales"].T, zeros_GO.T, shape, None)


def _unpack_packed(scheme: WeightScheme, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    bits = BITS[scheme.kind]
    codes_OI = _spread_words(tensors["weight_packed"], bits, dim=1)[:, : shape[1]]
    scales_OG = _scales(scheme, tensors["weight_scale"], shape)
    packed = tensors.get("weight_zero_point")
    if packed is None:
        zeros_OG = torch.full_like(scales_OG, _HALF[scheme.kind])
    else:
        zeros_OG = _spread_words(packed, bits, dim=0)[: shape[0]].float()
    return _integer_weight(scheme, codes_OI, scales_OG, zeros_OG, shape, tensors.get("weight_g_idx"))


def _unpack_codes(scheme: WeightScheme, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    scales_OG = torch.ones(shape[0], 1) if scale is None else _scales(scheme, scale, shape)
    zero = tensors.get("weight_zero_point")
    zeros_OG = None if zero is None or not zero.any() else _scales(scheme, zero, shape)
    size = scheme.block[1] if scheme.block is not None else scheme.group_size or shape[1]
    codes_OI = tensors["weight"]
    if scheme.kind == "int4":  # signed; from 0 on here
        codes_OI = codes_OI + _HALF["int4"]
        if bool(((codes_OI < 0) | (codes_OI > 15)).any()):
            raise CheckpointError(
                "a weight that quantization_config stores in 4 bits has codes outside -8 to 7; fetch the checkpoint "
                "again, or give num_bits = 8"
            )
        zeros_OG = (torch.zeros_like(scales_OG) if zeros_OG is None else zeros_OG) + _HALF["int4"]
    return QuantizedWeight(scheme.kind, codes_OI, scales_OG, zeros_OG, size)


def _integer_weight(
    scheme: WeightScheme,
    codes_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    zeros_OG: torch.Tensor,
    shape: tuple[int, int],
    group_I: torch.Tensor | None,
) -> QuantizedWeight:
    size = scheme.group_size or shape[1]
    zeros = zeros_OG.float()
    if scheme.kind == "int8":  # to the range of a signed byte
        codes_OI, zeros = codes_OI - 128, zeros - 128
    if group_I is not None:
        group_I = group_I.long()
        if bool((group_I < 0).any()) or torch.equal(group_I, torch.arange(shape[1]) // size):
            group_I = None  # compressed-tensors writes -1 where groups are in order
    return QuantizedWeight(
        scheme.kind,
        codes_OI.to(torch.int8).contiguous(),
        scales_OG.float().contiguous(),
        zeros.contiguous() if bool(zeros.any()) else None,
        size,
        group_I,
    )


def _spread_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpacks each word's codes along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (words.dim() - dim - 1))) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1)


def _scales(scheme: WeightScheme, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Expands scales of the tensor, of rows, groups or blocks to float32 [O, G]."""
    exact = scale.float()
    if scheme.block is not None:
        return exact.repeat_interleave(scheme.block[0], dim=0)[: shape[0]].contiguous()
    if exact.numel() == 1:
        return exact.reshape(1, 1).repeat(shape[0], 1)
    return exact.reshape(shape[0], -1).contiguous()
