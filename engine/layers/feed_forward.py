"""Implements the two kinds of feed-forward block: dense, and a mixture of experts of which each token takes a few.

Experts (Shazeer et al. 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088): a router gives each token the `C` experts of
highest probability, and their outputs are summed with those weights. Experts have no capacity, so no token is dropped.
A token's experts, and the order in which their outputs are added, depend only on its own values: the rest of the batch
changes a token's result by no more than the rounding of a matrix product.

Shapes: `T` tokens, `D` hidden, `F` intermediate, `E` experts, `C` experts of a token, `X` = T * C pairs of the two.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kernels.expert_routing import RoutingRule
from engine.kernels.layer_ops import LayerOps
from engine.layers.adapted import ProductAdapters, multiply
from engine.layers.linear import GroupedLinear, LayerTensors, Linear, fuse
from engine.layers.stacked_experts import StackedExperts
from engine.models.expert_config import ExpertConfig
from engine.weights.quantized_weight import Weight, stack_rows


class FeedForward(Protocol):
    def __call__(self, x_TD: torch.Tensor, ops: LayerOps, adapters: ProductAdapters | None = None) -> torch.Tensor: ...


class DenseFeedForward:
    """Computes `down(silu(gate(x)) * up(x))`, or with gelu instead of silu, with gate and up in one product."""

    def __init__(
        self, read: LayerTensors, block: str, *, has_bias: bool, is_fused: bool = False, is_gelu: bool = False
    ) -> None:
        """`is_fused`: the checkpoint stores gate and up as one tensor."""
        self.is_gelu = is_gelu
        stored = ["gate_up_proj"] if is_fused else ["gate_proj", "up_proj"]
        self.gate_up = fuse(read, [f"{block}.{name}" for name in stored], has_bias)
        self.down = fuse(read, [f"{block}.down_proj"], has_bias)

    def __call__(self, x_TD: torch.Tensor, ops: LayerOps, adapters: ProductAdapters | None = None) -> torch.Tensor:
        gate_up_T2F = multiply(self.gate_up, x_TD, adapters, "gate_up")
        inner_TF = ops.gelu_and_mul(gate_up_T2F) if self.is_gelu else ops.silu_and_mul(gate_up_T2F)
        return multiply(self.down, inner_TF, adapters, "down")


class ExpertFeedForward:
    """Computes the same block with the weights of each token's experts, and sums the results."""

    def __init__(self, config: ExpertConfig, read: LayerTensors) -> None:
        self._config, self._rule = config, _rule_of(config)
        names = config.names
        router_ED = read(names.router)
        shift_E = read(names.router_shift) if names.has_bias else None
        self._router = Linear(router_ED.float() if config.float32_router else router_ED, shift_E)
        self._bias_E = read(names.router_bias).float() if config.sigmoid else None
        self._shared = DenseFeedForward(read, names.shared, has_bias=False) if config.shared_size else None

        self._gate_up_bias_EX: torch.Tensor | None = None
        self._down_bias_ED: torch.Tensor | None = None
        if names.is_stacked:
            stacked = StackedExperts(config, read, router_ED.dtype)
            self._gate_up_bias_EX, self._down_bias_ED = stacked.gate_up_bias_EX, stacked.down_bias_ED
            self._gate_up = GroupedLinear(len(config.held), stacked.gate_up)
            self._down = GroupedLinear(len(config.held), stacked.down)
            return

        def gate_up(place: int) -> Weight:
            gate, up, _ = names.of(config.held[place])
            return stack_rows([read.weight(name, is_expert=True) for name in (gate, up)], router_ED.dtype)

        def down(place: int) -> Weight:
            return read.weight(names.of(config.held[place])[2], is_expert=True)

        self._gate_up = GroupedLinear(len(config.held), gate_up)
        self._down = GroupedLinear(len(config.held), down)

    def __call__(self, x_TD: torch.Tensor, ops: LayerOps, adapters: ProductAdapters | None = None) -> torch.Tensor:
        config = self._config  # adapters of experts are refused when they are read
        logits_TE = self._router(x_TD.float() if config.float32_router else x_TD)
        routing = ops.route_experts(logits_TE, self._rule, self._bias_E)
        if config.scales_inputs:
            scale_X1 = routing.by_place(routing.weight_TC)[:, None].to(x_TD.dtype)
            gate_up_X2F = ops.grouped_gemm(x_TD[routing.row_X] * scale_X1, self._gate_up, routing.start_E1, None)
        else:
            gate_up_X2F = ops.grouped_gemm(x_TD, self._gate_up, routing.start_E1, routing.row_X)
        if self._gate_up_bias_EX is None or self._down_bias_ED is None or config.swiglu is None:
            out_XD = ops.grouped_gemm(ops.silu_and_mul(gate_up_X2F), self._down, routing.start_E1, None)
        else:
            expert_X = (routing.by_place(routing.chosen_TC) - config.held.start).clamp_(0, len(config.held) - 1)
            gate_up_X2F = gate_up_X2F + self._gate_up_bias_EX.index_select(0, expert_X)
            inner_XF = clamped_swiglu(gate_up_X2F, *config.swiglu)
            out_XD = ops.grouped_gemm(inner_XF, self._down, routing.start_E1, None)
            out_XD = out_XD + self._down_bias_ED.index_select(0, expert_X)
        out_TD = ops.combine_experts(out_XD, routing, is_weighted=not config.scales_inputs)
        return out_TD if self._shared is None else out_TD + self._shared(x_TD, ops)


def _rule_of(config: ExpertConfig) -> RoutingRule:
    return RoutingRule(
        "top_sigmoid" if config.scales_inputs else "sigmoid" if config.sigmoid else "softmax",
        config.num_chosen,
        normalize=config.normalize,
        num_groups=config.num_groups,
        num_chosen_groups=config.num_chosen_groups,
        scaling=config.scaling,
        own_experts=config.own_experts,
    )


def clamped_swiglu(gate_up_X2F: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Returns the activation of gpt-oss (arXiv:2508.10925), [X, F]: gates are bounded above, ups on both
    sides, and 1 is added to ups."""
    gate_XF, up_XF = gate_up_X2F.chunk(2, dim=1)
    gate_XF = gate_XF.clamp(max=limit)
    return (up_XF.clamp(-limit, limit) + 1) * gate_XF * torch.sigmoid(gate_XF * alpha)
