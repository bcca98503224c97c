"""Computes linear layers with weights packed in tiles for the CPU kernels (`engine/cpu/csrc/linear.h`), in bf16 or
float32.

The layout is the same for every instruction set; only with AMX, in bf16, is a tile multiplied by one instruction.

A row's result depends only on the row, not on the other rows of the batch or the number of threads, which no library
guarantees. Reference: torch's linear. Quantized weights stay quantized in memory and are multiplied with exactly the
values they represent (`engine/cpu/csrc/quantized_linear.h`); reference: a product with their float32 values. Where the
checkpoint quantizes inputs too, products are sums of integers (`engine/cpu/csrc/int8_linear.h`); reference:
`engine/cpu/int8_products.py`.

Shapes: `T` tokens, `I` in, `O` out, `G` groups of inputs that share a scale.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.cpu.library import INT, POINTER, NativeKernels, load_native
from engine.weights.quantization_config import Activations
from engine.weights.quantized_weight import Kind, QuantizedWeight

_OUT_MULTIPLE, _IN_MULTIPLE = 16, 32  # a tile
_QUAD = 4  # inputs whose products one instruction adds
_MAX_INT8_INPUTS = 1 << 16  # more products of two bytes may overflow 32 bits
_KINDS = {("int4", None): 1, ("int8", None): 2, ("fp8", None): 3, ("int8", "int8"): 4, ("int4", "int8"): 5}
_MIDDLE = {"int4": 8, "int8": 0}  # the code of 0 in a symmetric weight
_FLOAT32 = 6  # the kernels' number for a weight that is not quantized, in float32; 0 in bf16
_DTYPES = (torch.bfloat16, torch.float32)
_TILE_BYTES = {"int4": 256, "int8": 512, "fp8": 512}


class PackedWeight(ctypes.Structure):
    """Mirrors `PackedWeight` of packed_weight.h, field by field."""

    _fields_ = (
        ("values", POINTER),
        ("bias", POINTER),
        ("inputs", INT),
        ("outputs", INT),
        ("codes", POINTER),
        ("scales", POINTER),
        ("zeros", POINTER),
        ("kind", INT),
        ("tiles_in_group", INT),
    )


@dataclass(frozen=True, slots=True)
class CodesLayout:
    """Describes a packed quantized weight, apart from its tensors and shape."""

    kind: Kind
    tiles_in_group: int
    has_zeros: bool
    activations: Activations | None = None


class TileLinear:
    """A packed weight, and the product with it. Its tensors may be replaced until the first call."""

    def __init__(
        self,
        kernels: NativeKernels,
        weight: torch.Tensor | QuantizedWeight,
        bias_O: torch.Tensor | None,
        codes: CodesLayout | None = None,
    ) -> None:
        """Packs `weight`. With `codes` the weight is a meta tensor, and the packed tensors are meta tensors in the
        layout that another replica has given its quantized weight."""
        self.dtype = torch.bfloat16  # of the rows
        if codes is None and not isinstance(weight, QuantizedWeight):
            self.dtype = weight.dtype
        assert self.dtype in _DTYPES
        assert bias_O is None or bias_O.dtype == self.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self.bias_O = None if bias_O is None else bias_O.contiguous()
        self.scales: torch.Tensor | None = None  # float32 [O / 16, G, 16]
        self.zeros: torch.Tensor | None = None  # the same
        self.codes = codes
        self._kernels = kernels
        self._described: PackedWeight | None = None
        if isinstance(weight, QuantizedWeight):
            self.packed = _pack_codes(weight) if weight.activations is None else pack_quads(weight)
            self.scales, self.zeros = _by_panel(weight.scales_OG), _by_panel(_zeros(weight))
            has_zeros = self.zeros is not None
            self.codes = CodesLayout(weight.kind, _tiles_in_group(weight), has_zeros, weight.activations)
            return
        if codes is not None:
            assert weight.is_meta
            panels, tiles = self.num_outputs // _OUT_MULTIPLE, self.num_inputs // _IN_MULTIPLE
            shape = (panels, -(-tiles // codes.tiles_in_group), _OUT_MULTIPLE)
            self.packed = torch.empty((panels, tiles, _TILE_BYTES[codes.kind]), dtype=torch.uint8, device=weight.device)
            self.scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
            self.zeros = torch.empty_like(self.scales) if codes.has_zeros else None
            return
        weight = weight.contiguous()
        self.packed = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if not weight.is_meta:  # a meta weight has been packed by another replica
            words = self.num_inputs * weight.element_size() // 4
            kernels.pack_linear(
                self.packed.data_ptr(), weight.data_ptr(), self.num_outputs, words, torch.get_num_threads()
            )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.packed, self.scales, self.zeros) if tensor is not None)

    def describe(self) -> PackedWeight:
        """Returns the C structure with the tensors' addresses; they must not move from now on."""
        if self._described is None:
            codes = self.codes
            self._described = PackedWeight(
                values=self.packed.data_ptr() if codes is None else None,
                bias=_address(self.bias_O),
                inputs=self.num_inputs,
                outputs=self.num_outputs,
                codes=None if codes is None else self.packed.data_ptr(),
                scales=_address(self.scales),
                zeros=_address(self.zeros),
                kind=self._kind,
                tiles_in_group=1 if codes is None else codes.tiles_in_group,
            )
        return self._described

    @property
    def _kind(self) -> int:
        if self.codes is not None:
            return _KINDS[self.codes.kind, self.codes.activations]
        return _FLOAT32 if self.dtype == torch.float32 else 0

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.dtype == self.dtype
        assert x_TI.shape[1] == self.num_inputs
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        out_TO = torch.empty((x_TI.shape[0], self.num_outputs), dtype=self.dtype)
        self._kernels.linear(
            out_TO.data_ptr(), x_TI.data_ptr(), ctypes.byref(self.describe()), x_TI.shape[0], x_TI.stride(0),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TO


def pack_for_tiles(
    weight: torch.Tensor | QuantizedWeight, bias_O: torch.Tensor | None, codes: CodesLayout | None = None
) -> TileLinear | None:
    """Packs the weight; returns None if this machine has no kernels or the weight does not fill whole tiles. `codes`
    is passed to `TileLinear`."""
    if isinstance(weight, QuantizedWeight):
        fits = can_pack_codes(weight)
    else:
        fits = weight.dtype in _DTYPES and not weight.shape[0] % _OUT_MULTIPLE | weight.shape[1] % _IN_MULTIPLE
    kernels = load_native() if fits else None
    return TileLinear(kernels, weight, bias_O, codes) if kernels is not None else None


def can_pack_codes(weight: QuantizedWeight) -> bool:
    """Returns whether the kernels of this machine can multiply with the quantized weight as it is."""
    outputs, inputs = weight.shape
    if weight.group_I is not None or outputs % _OUT_MULTIPLE or inputs % _IN_MULTIPLE:
        return False
    if weight.scales_OG.shape[1] > 1 and weight.group_size % _IN_MULTIPLE:
        return False
    if weight.activations is not None and (inputs > _MAX_INT8_INPUTS or not _is_symmetric(weight)):
        return False
    return load_native() is not None


def _tiles_in_group(weight: QuantizedWeight) -> int:
    inputs = weight.shape[1] if weight.scales_OG.shape[1] == 1 else weight.group_size
    return inputs // _IN_MULTIPLE


def _pack_codes(weight: QuantizedWeight) -> torch.Tensor:
    """Arranges the codes in the tiles of `penstock_pack_linear`, [O / 16, I / 32, bytes], in the order
    that code_values.h describes."""
    codes = weight.codes_OI.view(torch.uint8)
    if weight.kind == "int8":  # to a sign bit and a magnitude less a half: -1 is the largest value below 0
        codes = codes ^ ((weight.codes_OI >> 7) & 0x7F).view(torch.uint8)
    tiles = codes.unflatten(1, (-1, _IN_MULTIPLE // 2, 2)).unflatten(0, (-1, _OUT_MULTIPLE)).permute(0, 2, 3, 1, 4)
    if weight.kind == "int4":
        four = tiles.reshape(*tiles.shape[:2], 4, 4, 32)  # rows of the tile in fours, each of 32 words
        pairs = four[..., ::2, :] | four[..., 1::2, :] << 4
        return pairs.transpose(3, 4).flatten(2)  # the four codes of a word become adjacent
    return tiles.reshape(*tiles.shape[:2], 8, 2, 4, 8).transpose(3, 4).flatten(2)


def pack_quads(weight: QuantizedWeight) -> torch.Tensor:
    """Arranges the codes for sums of integers, [O / 16, I / 32, bytes], as int8_linear.h reads them."""
    codes = weight.codes_OI.view(torch.uint8) if weight.kind == "int4" else weight.codes_OI.view(torch.uint8) ^ 0x80
    tiles = codes.unflatten(1, (-1, _IN_MULTIPLE // _QUAD, _QUAD)).unflatten(0, (-1, _OUT_MULTIPLE))
    tiles = tiles.permute(0, 2, 3, 1, 4)  # [O / 16, I / 32, quads, 16, 4]
    if weight.kind == "int4":
        tiles = tiles[:, :, ::2] | tiles[:, :, 1::2] << 4
    return tiles.flatten(2).contiguous()


def _is_symmetric(weight: QuantizedWeight) -> bool:
    zeros_OG = torch.zeros(()) if weight.zeros_OG is None else weight.zeros_OG
    return bool((zeros_OG == _MIDDLE[weight.kind]).all())


def _zeros(weight: QuantizedWeight) -> torch.Tensor | None:
    """Returns the zero points [O, G] relative to the values that the kernel decodes, which differ from the codes."""
    if weight.activations is not None:  # the middle of the codes, which the kernel knows
        return None
    shift = {"int4": -8.0, "int8": 0.5, "fp8": 0.0}[weight.kind]
    if weight.zeros_OG is None:
        return torch.full_like(weight.scales_OG, shift) if shift else None
    return weight.zeros_OG + shift


def _by_panel(values_OG: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the values of each panel of 16 outputs together, [O / 16, G, 16]."""
    return None if values_OG is None else values_OG.unflatten(0, (-1, _OUT_MULTIPLE)).transpose(1, 2).contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
