"""Chooses each token's experts from the router's logits and sorts the (token, expert) pairs by expert, in plain torch.

It is the reference of `engine.kernels.triton.route_experts`, and runs where that cannot. Nothing waits for the device.

Shapes: `T` tokens, `E` experts, `C` experts of a token, `G` groups of experts, `X` = T * C pairs, `D` hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Describes the choice of a model's router.

    `softmax` weighs outputs by probabilities, `sigmoid` by sigmoids. `top_sigmoid` takes the highest logits, and its
    weights are the sigmoids that inputs are scaled by (Llama 4).

    Experts come from `num_chosen_groups` of `num_groups` equal groups. With `softmax` a group is ranked by its
    likeliest expert (DeepSeek-V2, arXiv:2405.04434, section 2.2.2), with `sigmoid` by its two best.
    """

    scoring: Literal["softmax", "sigmoid", "top_sigmoid"]
    num_chosen: int
    normalize: bool = False  # a token's weights sum to 1, before `scaling`
    num_groups: int = 1
    num_chosen_groups: int = 1
    scaling: float = 1.0  # of weights
    own_experts: range | None = None  # those of this rank, if experts are divided among ranks


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token's experts, and the places of the pairs in the order of their experts and, within one, of tokens.

    The rank's own experts come first, and pairs from place start[-1] on are computed by other ranks.
    """

    chosen_TC: torch.Tensor  # int64, the best first
    weight_TC: torch.Tensor  # float32
    place_TC: torch.Tensor  # int64, the pair's place
    row_X: torch.Tensor  # int64, the token at each place
    start_E1: torch.Tensor  # int32, where the places of each own expert begin
    is_partial: bool  # there may be pairs of other ranks

    def by_place(self, value_TC: torch.Tensor) -> torch.Tensor:
        """Returns the pairs' values in the order of places, [X]."""
        value_X = value_TC.flatten()
        return torch.empty_like(value_X).index_copy_(0, self.place_TC.flatten(), value_X)


def route_experts(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None) -> Routing:
    """Chooses and sorts. `bias_E` (float32) belongs to `sigmoid`: it balances the load, and affects the choice but not
    the weights (DeepSeek-V3, arXiv:2412.19437, sections 2.1.2 and 4.2)."""
    choose = _choose_biased if rule.scoring == "sigmoid" else _choose_likeliest
    chosen_TC, weight_TC = choose(logits_TE, rule, bias_E)
    own = rule.own_experts or range(logits_TE.shape[1])
    pair_X, start_E1 = group_by_expert((chosen_TC - own.start) % logits_TE.shape[1], len(own))
    place_X = torch.empty_like(pair_X).index_copy_(0, pair_X, torch.arange(len(pair_X), device=pair_X.device))
    place_TC, row_X = place_X.view(chosen_TC.shape), pair_X // rule.num_chosen
    return Routing(chosen_TC, weight_TC, place_TC, row_X, start_E1, rule.own_experts is not None)


def combine_experts(out_XD: torch.Tensor, routing: Routing, is_weighted: bool = True) -> torch.Tensor:
    """Returns the sum of each token's outputs [T, D], in float32, rounded once to their dtype.

    Pairs of other ranks add nothing.
    """
    num_tokens, num_chosen = routing.place_TC.shape
    by_token_TCD = out_XD.index_select(0, routing.place_TC.flatten()).view(num_tokens, num_chosen, out_XD.shape[1])
    if routing.is_partial:
        by_token_TCD.masked_fill_((routing.place_TC >= routing.start_E1[-1])[:, :, None], 0.0)
    if is_weighted:
        return (by_token_TCD * routing.weight_TC[:, :, None]).sum(dim=1).to(out_XD.dtype)
    return by_token_TCD.float().sum(dim=1).to(out_XD.dtype)


def _choose_likeliest(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if rule.scoring == "top_sigmoid":
        logits_TC, chosen_TC = logits_TE.topk(rule.num_chosen, dim=-1)
        return chosen_TC, logits_TC.float().sigmoid()
    scores_TE = logits_TE.float().softmax(dim=-1)
    if rule.num_chosen_groups < rule.num_groups:
        scores_TGE = scores_TE.unflatten(1, (rule.num_groups, -1))
        scores_TE = _mask_groups(scores_TGE, scores_TGE.amax(dim=2), rule.num_chosen_groups, 0.0)
    weight_TC, chosen_TC = scores_TE.topk(rule.num_chosen, dim=-1)
    if rule.normalize:
        weight_TC = weight_TC / weight_TC.sum(dim=-1, keepdim=True)
    return chosen_TC, weight_TC * rule.scaling


def _choose_biased(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_TE = logits_TE.float().sigmoid()
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.num_chosen_groups < rule.num_groups:
        biased_TGE = biased_TE.unflatten(1, (rule.num_groups, -1))
        group_TG = biased_TGE.topk(2, dim=2).values.sum(dim=2)
        biased_TE = _mask_groups(biased_TGE, group_TG, rule.num_chosen_groups, float("-inf"))
    chosen_TC = biased_TE.topk(rule.num_chosen, dim=-1).indices
    weight_TC = scores_TE.gather(1, chosen_TC)
    if rule.normalize:
        weight_TC = weight_TC / (weight_TC.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return chosen_TC, weight_TC * rule.scaling


def _mask_groups(scores_TGE: torch.Tensor, group_TG: torch.Tensor, num_best: int, masked: float) -> torch.Tensor:
    """Returns the scores [T, experts], with `masked` for experts of all but the best groups."""
    best_TM = group_TG.topk(num_best, dim=1).indices
    is_best_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_TM, True)
    return scores_TGE.masked_fill(~is_best_TG[:, :, None], masked).flatten(1)


def group_by_expert(chosen_TC: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs (token * C + choice) sorted by expert, int64 [X], and where those of each of the first
    `num_experts` begin, int32 [num_experts + 1]."""
    expert_X, pair_X = chosen_TC.flatten().sort(stable=True)
    bounds_E1 = torch.arange(num_experts + 1, device=expert_X.device)
    return pair_X, torch.searchsorted(expert_X, bounds_E1, out_int32=True)
