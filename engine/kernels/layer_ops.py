"""Defines the small operations between a decoder's matrix products: their interface, and their plain-torch reference.

`TorchOps` is what the tests compare `engine.cpu.native` and `engine.kernels.triton` with, and it runs where neither
can. No operation changes its arguments, except that `add_rms_norm` may reuse their memory for its results.

Shapes: `T` tokens, `D` hidden, `N` query heads, `K` KV heads, `H` head dim, `F` intermediate, `E` experts, `I` in,
`C` experts of a token, `O` out, `X` rows sent to experts, `R` rows they are gathered from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels import adapter_weights, expert_routing
from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.expert_routing import Routing, RoutingRule

Product = Callable[[torch.Tensor], torch.Tensor]


class ExpertWeights(Protocol):
    """A weight of the same shape for each expert (`engine.layers.linear.GroupedLinear`)."""

    weight_EOI: torch.Tensor | None  # all weights stacked; None if each is packed separately
    scales_EGO: torch.Tensor | None  # float32, of e4m3 weights for each of G groups of inputs; None if plain

    @property
    def experts(self) -> Sequence[Product]: ...


class LayerOps(Protocol):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalises the last dimension by its root mean square (Zhang and Sennrich 2019, arXiv:1910.07467)."""
        ...

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of the sum, the sum)."""
        ...

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """Returns silu(first half) * second half."""
        ...

    def gelu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """Returns gelu(first half) * second half, with gelu's approximation by tanh."""
        ...

    def rope(self, x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
        """Rotates every head by its token's angles; `cos_sin_T2H` is float32 [T, 2, H / 2]."""
        ...

    def route_experts(self, logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None) -> Routing:
        """Chooses each token's experts and sorts the pairs by expert, as `expert_routing.route_experts`."""
        ...

    def combine_experts(self, out_XD: torch.Tensor, routing: Routing, *, is_weighted: bool) -> torch.Tensor:
        """Returns the sum of each token's outputs [T, D], as `expert_routing.combine_experts`."""
        ...

    def grouped_gemm(
        self, x_RI: torch.Tensor, weight: ExpertWeights, start_E1: torch.Tensor, rows_X: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiplies places start[e] to start[e + 1] with expert e's weight; returns [X, O], undefined from place
        start[E] on. Place i is row `rows_X[i]` of `x_RI`, or row i without `rows_X`."""
        ...

    def adapter_rows(self, slot_T: torch.Tensor, num_slots: int) -> AdapterRows:
        """Returns what `add_adapters` needs to know of a step's rows; `slot_T` is int64."""
        ...

    def add_adapters(self, y_TO: torch.Tensor, x_TI: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
        """Adds `(x A^T) B^T` to each row of `y_TO`, in place, with the matrices of its slot; rows of slot 0 stay as
        they are."""
        ...


class TorchOps:
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype != x.dtype:  # float32, to be multiplied before the result is rounded
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_TD = x_TD + residual_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_T2F.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_T2F.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def rope(self, x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
        return apply_rope(x_TNH, cos_sin_T2H.to(x_TNH.dtype))

    def route_experts(self, logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None) -> Routing:
        return expert_routing.route_experts(logits_TE, rule, bias_E)

    def combine_experts(self, out_XD: torch.Tensor, routing: Routing, *, is_weighted: bool) -> torch.Tensor:
        return expert_routing.combine_experts(out_XD, routing, is_weighted)

    def grouped_gemm(
        self, x_RI: torch.Tensor, weight: ExpertWeights, start_E1: torch.Tensor, rows_X: torch.Tensor | None
    ) -> torch.Tensor:
        return grouped_gemm(x_RI, weight.experts, start_E1, rows_X)

    def adapter_rows(self, slot_T: torch.Tensor, num_slots: int) -> AdapterRows:
        return AdapterRows(slot_T)

    def add_adapters(self, y_TO: torch.Tensor, x_TI: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
        adapter_weights.add_adapters(y_TO, x_TI, weights, rows)


def apply_rope(x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
    """Rotates every head by its token's position; `cos_sin_T2H` is [T, 2, H / 2] in x's dtype. Returns a new tensor."""
    cos, sin = cos_sin_T2H[:, 0, None], cos_sin_T2H[:, 1, None]
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def grouped_gemm(
    x_RI: torch.Tensor, products: Sequence[Product], start_E1: torch.Tensor, rows_X: torch.Tensor | None
) -> torch.Tensor:
    """Calls `products[e]` once for each expert with rows, as `LayerOps.grouped_gemm`; returns [X, O]. Waits for the
    device."""
    x_XI = x_RI if rows_X is None else x_RI.index_select(0, rows_X)
    parts = [
        products[expert](x_XI[start:stop])
        for expert, (start, stop) in enumerate(pairwise(start_E1.tolist()))
        if start < stop
    ]
    if num_undefined := len(x_XI) - int(start_E1[-1]):
        num_outputs = (parts[0] if parts else products[0](x_XI[:0])).shape[1]
        parts.append(x_XI.new_full((num_undefined, num_outputs), torch.nan))
    return torch.cat(parts) if parts else products[0](x_XI)
