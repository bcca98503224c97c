"""Reads experts that a checkpoint stores as one tensor per layer: gates, then ups (Llama 4), or alternating and with
biases, plain or in MXFP4 (gpt-oss).

MXFP4 (OCP Microscaling Formats v1.0) stores 32 inputs as 16 bytes of two e2m1 codes, the lower half first, and a byte
with the exponent of the scale they share. e4m3 represents every e2m1 value, so the weights become fp8 codes with a
scale for each group if the machine multiplies with those, and plain values otherwise; both are exact.

Shapes: `E` experts, `D` hidden, `F` intermediate, `O` out, `I` in, `G` groups of 32 inputs.
"""

from __future__ import annotations

import torch

from engine.layers.linear import LayerTensors
from engine.models.expert_config import MXFP4_GROUP, ExpertConfig
from engine.weights.quantized_weight import QuantizedWeight, Weight, join

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT32_FRACTION_BITS = 23


class StackedExperts:
    """Returns the weights of one expert at a time. It holds the layer's stored tensors, so keep it only while the layer
    is being built.
    """

    def __init__(self, config: ExpertConfig, read: LayerTensors, dtype: torch.dtype) -> None:
        names = config.names
        self._is_coded, self._dtype, self._read = config.mxfp4, dtype, read
        self._gate_up = [read(name) for name in names.stored("gate_up_proj", config.mxfp4)]
        self._down = [read(name) for name in names.stored("down_proj", config.mxfp4)]
        self._alternates = names.has_bias
        self.gate_up_bias_EX: torch.Tensor | None = None
        self.down_bias_ED: torch.Tensor | None = None
        if names.has_bias:
            self.gate_up_bias_EX = _halves(read(names.stacked_bias("gate_up_proj")).T).T.contiguous()
            self.down_bias_ED = read(names.stacked_bias("down_proj"))

    def gate_up(self, expert: int) -> Weight:
        """Returns [2 * F, D], the gates first."""
        if not self._is_coded:
            rows = self._gate_up[0][expert].T
            return _halves(rows) if self._alternates else rows.contiguous()
        return self._weight(*(_halves(stored[expert]) for stored in self._gate_up))

    def down(self, expert: int) -> Weight:
        """Returns [D, F]."""
        if not self._is_coded:
            return self._down[0][expert].T.contiguous()
        return self._weight(*(stored[expert] for stored in self._down))

    def _weight(self, blocks_OGB: torch.Tensor, exponents_OG: torch.Tensor) -> Weight:
        if blocks_OGB.is_meta:
            shape = (blocks_OGB.shape[0], MXFP4_GROUP * blocks_OGB.shape[1])
            return torch.empty(shape, dtype=self._dtype, device=blocks_OGB.device)
        return self._read.multipliable(unpack_mxfp4(blocks_OGB, exponents_OG), is_expert=True)


def unpack_mxfp4(blocks_OGB: torch.Tensor, exponents_OG: torch.Tensor) -> QuantizedWeight:
    """Returns the weight [O, 32 * G] as e4m3 codes with a scale for each group of 32 inputs."""
    signed = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=blocks_OGB.device)
    as_e4m3 = signed.to(torch.float8_e4m3fn).view(torch.uint8)
    codes_OGX2 = torch.stack((blocks_OGB & 0xF, blocks_OGB >> 4), dim=-1)
    codes_OI = as_e4m3[codes_OGX2.flatten(1).int()].view(torch.float8_e4m3fn)
    scales_OG = (exponents_OG.int() << _FLOAT32_FRACTION_BITS).view(torch.float32)  # the biases are the same; 0 is 0
    return QuantizedWeight("fp8", codes_OI, scales_OG, None, MXFP4_GROUP)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Reorders rows that alternate between gate and up: all gates, then all ups."""
    return join((rows[0::2], rows[1::2]))
