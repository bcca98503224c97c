"""Products with weights packed for AMX tiles (`engine/kernels/cpu/linear.h`), bf16 on CPUs that have them.

A row's result depends on the row alone: not on who shares its batch, nor on the number of threads, which no library
product promises. Twin: torch's linear.

Shapes: `T` tokens, `I` in, `O` out.
"""

from __future__ import annotations

import torch

from engine.kernels.cpu_library import NativeKernels, load_native

_OUT_MULTIPLE, _IN_MULTIPLE = 16, 32  # a tile


class TileLinear:
    """A packed weight and its product."""

    def __init__(self, kernels: NativeKernels, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        assert weight_OI.dtype == torch.bfloat16
        assert bias_O is None or bias_O.dtype == torch.bfloat16
        weight_OI = weight_OI.contiguous()
        self.num_outputs, self.num_inputs = weight_OI.shape
        self.bias_O = None if bias_O is None else bias_O.contiguous()
        self.packed = torch.empty(weight_OI.shape, dtype=weight_OI.dtype, device=weight_OI.device)
        self._kernels = kernels
        if weight_OI.is_meta:
            return  # another replica has packed it
        kernels.pack_linear(
            self.packed.data_ptr(),
            weight_OI.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            torch.get_num_threads(),
        )

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.dtype == torch.bfloat16
        assert x_TI.shape[1] == self.num_inputs
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        out_TO = torch.empty((x_TI.shape[0], self.num_outputs), dtype=torch.bfloat16)
        self._kernels.linear(
            out_TO.data_ptr(),
            x_TI.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias_O is None else self.bias_O.data_ptr(),
            x_TI.shape[0],
            x_TI.stride(0),
            self.num_outputs,
            self.num_inputs,
            torch.get_num_threads(),
        )
        return out_TO


def pack_for_tiles(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> TileLinear | None:
    """None where this machine has no tiles, or the weight does not fill them."""
    num_outputs, num_inputs = weight_OI.shape
    if weight_OI.dtype != torch.bfloat16 or num_outputs % _OUT_MULTIPLE or num_inputs % _IN_MULTIPLE:
        return None
    kernels = load_native()
    return TileLinear(kernels, weight_OI, bias_O) if kernels is not None and kernels.has_tiles else None
