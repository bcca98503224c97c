"""Linear layers whose weights are laid out for the machine they run on: one, and one for each of many experts.

On a CPU with AMX tiles a bf16 weight is packed for the kernel of `engine.kernels.cpu_linear`, on others once for oneDNN
(a third faster than a plain product at batch 1-64 on AVX-512, measured 2026-11); everywhere else it is an ordinary
matrix product.

Shapes: `T` tokens, `I` in, `O` out, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.kernels.cpu_linear import pack_for_tiles


class Linear:
    """`y_TO = x_TI @ weight_OI.T + bias_O`."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self._bias_O = bias_O
        self.tiles = pack_for_tiles(weight_OI, bias_O) if weight_OI.device.type == "cpu" else None
        self._packed = _pack(weight_OI) if self.tiles is None else None
        self._weight_OI = weight_OI.contiguous() if self.tiles is None and self._packed is None else None

    @property
    def kind(self) -> str:
        """How its weight is laid out."""
        return "tiles" if self.tiles is not None else "packed" if self._packed is not None else "plain"

    def become(self, kind: str) -> None:
        """Of one that was made of a weight without values: laid out as another replica's, whose values it is given."""
        weight_OI = self._weight_OI
        assert weight_OI is not None
        assert weight_OI.is_meta
        if kind == "tiles":
            self.tiles, self._weight_OI = pack_for_tiles(weight_OI, self._bias_O), None
        elif kind == "packed":
            self._packed, self._weight_OI = weight_OI, None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.tiles is not None:
            return self.tiles(x_TI)
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")
        assert self._weight_OI is not None
        return F.linear(x_TI, self._weight_OI, self._bias_O)


def fuse(read: Callable[[str], torch.Tensor], paths: Sequence[str], has_bias: bool) -> Linear:
    """Products that share an input, as one."""
    weight = join([read(f"{path}.weight") for path in paths])
    return Linear(weight, join([read(f"{path}.bias") for path in paths]) if has_bias else None)


def join(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat`, which for tensors without values would import a second's worth of modules."""
    if parts[0].is_meta:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat(list(parts), dim=dim)


class GroupedLinear:
    """A weight for each expert, all of one shape; `LayerOps.grouped_gemm` multiplies with it."""

    def __init__(self, num_experts: int, read: Callable[[int], torch.Tensor]) -> None:
        """`read` gives an expert's weight, [O, I]; at most one stands in memory twice."""
        first_OI = read(0)
        if first_OI.device.type in ("cpu", "meta"):  # each packed by itself
            self.weight_EOI: torch.Tensor | None = None
            self.experts = (Linear(first_OI), *(Linear(read(expert)) for expert in range(1, num_experts)))
            return
        self.weight_EOI = first_OI.new_empty((num_experts, *first_OI.shape))
        for expert in range(num_experts):
            self.weight_EOI[expert] = first_OI if expert == 0 else read(expert)
        self.experts = tuple(Linear(weight_OI) for weight_OI in self.weight_EOI)  # views


def _pack(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's own layout, or None where it has none for this device and dtype."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight_OI.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    if weight_OI.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
