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
        self._config = config
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
        groups = (config.num_groups, config.num_chosen_groups)
        if config.scales_inputs:
            chosen_TC, weight_TC = choose_scaled(logits_TE, config.num_chosen)
        elif self._bias_E is None:
            chosen_TC, weight_TC = choose_experts(logits_TE, config.num_chosen, config.normalize, groups)
        else:
            chosen_TC, weight_TC = choose_biased(logits_TE, self._bias_E, config.num_chosen, config.normalize, groups)
        num_tokens, num_chosen = chosen_TC.shape
        if config.own_experts is not None:
            chosen_TC = place_experts(chosen_TC, config.own_experts)
        pair_X, start_E1 = group_by_expert(chosen_TC, len(config.held))
        if config.scales_inputs:
            scale_X1 = weight_TC.flatten()[pair_X, None].to(x_TD.dtype)
            gate_up_X2F = ops.grouped_gemm(x_TD[pair_X // num_chosen] * scale_X1, self._gate_up, start_E1, None)
            weight_TC = torch.ones_like(weight_TC)
        else:
            gate_up_X2F = ops.grouped_gemm(x_TD, self._gate_up, start_E1, pair_X // num_chosen)
        if self._gate_up_bias_EX is None or self._down_bias_ED is None or config.swiglu is None:
            out_XD = ops.grouped_gemm(ops.silu_and_mul(gate_up_X2F), self._down, start_E1, None)
        else:
            expert_X = chosen_TC.flatten().index_select(0, pair_X).clamp_(max=len(config.held) - 1)
            gate_up_X2F = gate_up_X2F + self._gate_up_bias_EX.index_select(0, expert_X)
            inner_XF = clamped_swiglu(gate_up_X2F, *config.swiglu)
            out_XD = ops.grouped_gemm(inner_XF, self._down, start_E1, None)
            out_XD = out_XD + self._down_bias_ED.index_select(0, expert_X)
        if config.own_experts is not None:  # experts on other ranks add nothing here
            place_X1 = torch.arange(len(out_XD), device=out_XD.device)[:, None]
            out_XD = out_XD.masked_fill_(place_X1 >= start_E1[-1], 0.0)
        by_pair_XD = torch.empty_like(out_XD).index_copy_(0, pair_X, out_XD)
        by_token_TCD = by_pair_XD.view(num_tokens, num_chosen, out_XD.shape[1])
        out_TD = (by_token_TCD * (weight_TC * config.scaling)[:, :, None]).sum(dim=1).to(x_TD.dtype)
        return out_TD if self._shared is None else out_TD + self._shared(x_TD, ops)


def clamped_swiglu(gate_up_X2F: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Returns the activation of gpt-oss (arXiv:2508.10925), [X, F]: gates are bounded above, ups on both
    sides, and 1 is added to ups."""
    gate_XF, up_XF = gate_up_X2F.chunk(2, dim=1)
    gate_XF = gate_XF.clamp(max=limit)
    return (up_XF.clamp(-limit, limit) + 1) * gate_XF * torch.sigmoid(gate_XF * alpha)


def choose_experts(
    logits_TE: torch.Tensor, num_chosen: int, normalize: bool, groups: tuple[int, int] = (1, 1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's experts [T, C], the likeliest first, and the weights of their outputs, float32 [T, C].

    With `groups` = (n, m), experts are chosen only from the m of n equal groups that have the likeliest single expert
    (arXiv:2405.04434, section 2.2.2).
    """
    scores_TE = logits_TE.float().softmax(dim=-1)
    if groups[1] < groups[0]:
        scores_TGE = scores_TE.unflatten(1, (groups[0], -1))
        scores_TE = _mask_groups(scores_TGE, scores_TGE.amax(dim=2), groups[1], 0.0)
    weight_TC, chosen_TC = scores_TE.topk(num_chosen, dim=-1)
    if normalize:
        weight_TC = weight_TC / weight_TC.sum(dim=-1, keepdim=True)
    return chosen_TC, weight_TC


def choose_scaled(logits_TE: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's experts [T, C] and the scales of their inputs, float32 [T, C]: sigmoids (Llama 4)."""
    logits_TC, chosen_TC = logits_TE.topk(num_chosen, dim=-1)
    return chosen_TC, logits_TC.float().sigmoid()


def choose_biased(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, num_chosen: int, normalize: bool, groups: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `choose_experts` does, scored by sigmoids, with a bias that balances the load: it affects the choice
    but not the weights. A group is ranked by its two best experts (DeepSeek-V3, arXiv:2412.19437, sections 2.1.2 and
    4.2: "noaux_tc")."""
    scores_TE = logits_TE.float().sigmoid()
    biased_TE = scores_TE + bias_E
    if groups[1] < groups[0]:
        biased_TGE = biased_TE.unflatten(1, (groups[0], -1))
        group_TG = biased_TGE.topk(2, dim=2).values.sum(dim=2)
        biased_TE = _mask_groups(biased_TGE, group_TG, groups[1], float("-inf"))
    chosen_TC = biased_TE.topk(num_chosen, dim=-1).indices
    weight_TC = scores_TE.gather(1, chosen_TC)
    if normalize:
        weight_TC = weight_TC / (weight_TC.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return chosen_TC, weight_TC


def _mask_groups(scores_TGE: torch.Tensor, group_TG: torch.Tensor, num_best: int, masked: float) -> torch.Tensor:
    """Returns the scores [T, experts], with `masked` for experts of all but the best groups."""
    best_TM = group_TG.topk(num_best, dim=1).indices
    is_best_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_TM, True)
    return scores_TGE.masked_fill(~is_best_TG[:, :, None], masked).flatten(1)


def place_experts(chosen_TC: torch.Tensor, own: range) -> torch.Tensor:
    """Returns the place of each expert among a rank's `own`, and their number for experts on other ranks."""
    is_own_TC = (chosen_TC >= own.start) & (chosen_TC < own.stop)
    return (chosen_TC - own.start).masked_fill_(~is_own_TC, len(own))


def group_by_expert(chosen_TC: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs (token * C + choice) sorted by expert, int64 [X], and where each expert's pairs begin, int32
    [E + 1]. Pairs of experts from `num_experts` on come after start[E]. Does not wait for the device."""
    expert_X, pair_X = chosen_TC.flatten().sort(stable=True)
    bounds_E1 = torch.arange(num_experts + 1, device=expert_X.device)
    return pair_X, torch.searchsorted(expert_X, bounds_E1, out_int32=True)
