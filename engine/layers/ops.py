"""The small operations between a decoder's matrix products, behind one interface.

`TorchOps` is the plain implementation and the oracle of the others (`engine.kernels.cpu_native` fuses them on CPU).
None of them changes its arguments, except that `add_rms_norm` may put its results into them.

Shapes: `T` tokens, `D` hidden, `N` query heads, `K` KV heads, `H` head dim, `F` intermediate, `E` experts, `I` in,
`O` out, `X` rows that go to experts, `R` rows that these are read from.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels.reference import grouped_gemm
from engine.layers.linear import GroupedLinear
from engine.layers.rope import apply_rope


class LayerOps(Protocol):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalises the last dimension by its root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""
        ...

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum)."""
        ...

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        ...

    def rope(self, x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
        """Rotates every head by its token's angles; `cos_sin_T2H` is float32 [T, 2, H / 2]."""
        ...

    def grouped_gemm(
        self, x_RI: torch.Tensor, weight: GroupedLinear, start_E1: torch.Tensor, rows_X: torch.Tensor | None
    ) -> torch.Tensor:
        """[X, O]: places start[e] to start[e + 1] are multiplied with expert e's weight. Place i is row `rows_X[i]` of
        `x_RI`, or row i."""
        ...


class TorchOps:
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_TD = x_TD + residual_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_T2F.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope(self, x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
        return apply_rope(x_TNH, cos_sin_T2H.to(x_TNH.dtype))

    def grouped_gemm(
        self, x_RI: torch.Tensor, weight: GroupedLinear, start_E1: torch.Tensor, rows_X: torch.Tensor | None
    ) -> torch.Tensor:
        return grouped_gemm(x_RI, weight.experts, start_E1, rows_X)
