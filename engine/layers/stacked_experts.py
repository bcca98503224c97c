"""Experts that a checkpoint stores as one tensor a layer, gate and up interleaved (gpt-oss), plain or in MXFP4.

MXFP4 (OCP Microscaling Formats v1.0) stores 32 inputs as 16 bytes of two e2m1 codes, the lower half first, and a byte
with the exponent of the scale they share. It is decoded while loading.

Shapes: `E` experts, `D` hidden, `F` intermediate, `O` out, `I` in, `G` groups of 32 inputs.
"""

from __future__ import annotations

import torch

from engine.layers.linear import LayerTensors
from engine.models.expert_config import ExpertConfig
from engine.weights.quantized_weight import join

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class StackedExperts:
    """Returns the weights of one expert after another. Holds the layer's stored tensors, so keep it no longer than the
    layer is being built."""

    def __init__(self, config: ExpertConfig, read: LayerTensors, dtype: torch.dtype) -> None:
        names = config.names
        self._is_coded, self._dtype = config.mxfp4, dtype
        self._gate_up = [read(name) for name in names.stored("gate_up_proj", config.mxfp4)]
        self._down = [read(name) for name in names.stored("down_proj", config.mxfp4)]
        self.gate_up_bias_EX = _halves(read(names.stacked_bias("gate_up_proj")).T).T.contiguous()
        self.down_bias_ED = read(names.stacked_bias("down_proj"))

    def gate_up(self, expert: int) -> torch.Tensor:
        """Returns [2 * F, D], the gates first."""
        return _halves(self._weight(self._gate_up, expert))

    def down(self, expert: int) -> torch.Tensor:
        """Returns [D, F]."""
        return self._weight(self._down, expert)

    def _weight(self, stored: list[torch.Tensor], expert: int) -> torch.Tensor:
        if self._is_coded:
            return decode_mxfp4(stored[0][expert], stored[1][expert], self._dtype)
        return stored[0][expert].T.contiguous()


def decode_mxfp4(blocks_OGB: torch.Tensor, exponents_OG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values [O, 32 * G]; bf16 and float32 represent all of them exactly. On meta nothing is computed."""
    outputs, groups, _ = blocks_OGB.shape
    if blocks_OGB.is_meta:
        return torch.empty((outputs, 32 * groups), dtype=dtype, device=blocks_OGB.device)
    signed = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=blocks_OGB.device)
    codes_OGX2 = torch.stack((blocks_OGB & 0xF, blocks_OGB >> 4), dim=-1)
    values_OGI = signed[codes_OGX2.flatten(2).int()]
    return torch.ldexp(values_OGI, (exponents_OG.int() - _EXPONENT_BIAS)[..., None]).flatten(1).to(dtype)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Reorders rows that alternate between gate and up: all gates, then all ups."""
    return join((rows[0::2], rows[1::2]))
