"""Compares the kernels that route tokens to experts, and sum the experts' outputs, with plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import expert_routing
from engine.kernels.expert_routing import Routing, RoutingRule
from engine.kernels.triton import route_experts as kernel_file
from engine.kernels.triton.combine_experts import combine_experts
from engine.kernels.triton.route_experts import route_experts
from tests.engine.kernels.products.test_grouped_gemm import DEVICE

RULES = {
    "mixtral": (8, RoutingRule("softmax", 2, normalize=True)),
    "qwen3_moe": (128, RoutingRule("softmax", 8, normalize=True)),
    "deepseek_v2_lite": (64, RoutingRule("softmax", 6)),
    "deepseek_v2": (160, RoutingRule("softmax", 6, num_groups=8, num_chosen_groups=3, scaling=16.0)),
    "deepseek_v3": (256, RoutingRule("sigmoid", 8, True, num_groups=8, num_chosen_groups=4, scaling=2.5)),
    "glm4_moe": (128, RoutingRule("sigmoid", 8, True)),
    "gpt_oss": (32, RoutingRule("softmax", 4, normalize=True)),
    "llama4": (16, RoutingRule("top_sigmoid", 1)),
    "odd groups": (15, RoutingRule("sigmoid", 3, False, num_groups=5, num_chosen_groups=2)),
    "one expert": (1, RoutingRule("softmax", 1)),
    "all experts": (5, RoutingRule("softmax", 5, normalize=True)),
}


def check(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None) -> Routing:
    found, wanted = route_experts(logits_TE, rule, bias_E), expert_routing.route_experts(logits_TE, rule, bias_E)
    assert torch.equal(found.chosen_TC, wanted.chosen_TC)
    torch.testing.assert_close(found.weight_TC, wanted.weight_TC, rtol=1e-5, atol=1e-7)
    for name in ("place_TC", "row_X", "start_E1"):
        tensor, expected = getattr(found, name), getattr(wanted, name)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    return found


def untied(num_tokens: int, num_experts: int) -> torch.Tensor:
    """Returns logits of which no two of a row are equal, also after a softmax: torch may choose either of equals."""
    order_TE = torch.stack([torch.randperm(num_experts) for _ in range(num_tokens)]) if num_tokens else torch.empty(0)
    return (order_TE.float() * (8 / num_experts) - 4).view(num_tokens, num_experts).to(DEVICE)


@pytest.mark.parametrize("family", RULES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 70])
def test_routes_equal_the_reference(family: str, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    num_experts, rule = RULES[family]
    logits_TE = untied(num_tokens, num_experts)
    bias_E = None
    if rule.scoring == "sigmoid":
        bias_E = torch.randperm(num_experts).float().to(DEVICE) / (3 * num_experts)
    check(logits_TE, rule, bias_E)


@pytest.mark.parametrize("own", [range(0, 2), range(3, 6), range(6, 8)])
@pytest.mark.parametrize("num_tokens", [5, 1100])
def test_pairs_of_other_ranks_come_last_and_add_nothing(own: range, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    num_experts, rule = RULES["mixtral"]
    routing = check(untied(num_tokens, num_experts), replace(rule, own_experts=own), None)
    num_own = int(routing.start_E1[-1])
    assert num_own == sum(expert in own for expert in routing.chosen_TC.flatten().tolist())
    out_XD = torch.randn(2 * num_tokens, 40, device=DEVICE)
    out_XD[num_own:] = float("nan")  # of places that are not computed
    found = combine_experts(out_XD, routing, is_weighted=True)
    torch.testing.assert_close(found, expert_routing.combine_experts(out_XD, routing))
    assert not found.isnan().any()


def test_tokens_of_many_tiles_are_placed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    monkeypatch.setattr(kernel_file, "_TILES_ALONE", 2)
    monkeypatch.setattr(kernel_file, "_VALUES", 64)  # 18 tiles of 8 tokens
    check(untied(143, 8), RULES["mixtral"][1], None)


def test_strided_logits_in_bf16_are_read_in_place() -> None:
    torch.manual_seed(8)
    wide_TE = (torch.stack([torch.randperm(64) for _ in range(20)]) / 8).bfloat16().to(DEVICE)
    check(wide_TE[:, 3:35], RoutingRule("softmax", 4, normalize=True), None)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "llama4"])
def test_rows_of_nan_and_ties_take_existing_experts_once(family: str) -> None:
    """All pairs keep a place, so the rows of other tokens are right."""
    num_experts, rule = RULES[family]
    logits_TE = torch.zeros(9, num_experts, device=DEVICE)
    logits_TE[1::3] = float("nan")
    logits_TE[2::3, : num_experts // 2] = float("-inf")
    bias_E = torch.zeros(num_experts, device=DEVICE) if rule.scoring == "sigmoid" else None
    found = route_experts(logits_TE, rule, bias_E)
    for chosen in found.chosen_TC.tolist():
        assert len(set(chosen)) == rule.num_chosen
        assert set(chosen) <= set(range(num_experts))
    assert found.chosen_TC[0].tolist() == list(range(rule.num_chosen)), "the first of equals"
    assert found.weight_TC[1].isnan().all()
    assert not found.weight_TC[0].isnan().any()
    assert sorted(found.place_TC.flatten().tolist()) == list(range(9 * rule.num_chosen))
    assert found.start_E1[-1] == 9 * rule.num_chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("width", [1, 123, 2048])
def test_outputs_are_summed_in_their_tokens_order(dtype: torch.dtype, is_weighted: bool, width: int) -> None:
    torch.manual_seed(width)
    routing = expert_routing.route_experts(untied(7, 8), RULES["mixtral"][1])
    out_XD = torch.randn(14, width, device=DEVICE).to(dtype)
    found = combine_experts(out_XD, routing, is_weighted=is_weighted)
    wanted = expert_routing.combine_experts(out_XD, routing, is_weighted)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter truncates to bf16
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_no_tokens_have_no_sums() -> None:
    routing = expert_routing.route_experts(untied(0, 8), RULES["mixtral"][1])
    assert combine_experts(torch.empty(0, 5, device=DEVICE), routing, is_weighted=True).shape == (0, 5)


def test_wrong_shapes_are_refused() -> None:
    rule = RULES["mixtral"][1]
    with pytest.raises(ValueError, match="at most 1024 experts"):
        route_experts(torch.zeros(2, 1025), rule)
    with pytest.raises(ValueError, match=r"bias_E is torch.float64 \(8,\); expected torch.float32 \[8\]"):
        route_experts(torch.zeros(2, 8), rule, torch.zeros(8, dtype=torch.float64))
    routing = expert_routing.route_experts(untied(3, 8), rule)
    with pytest.raises(ValueError, match=r"expected contiguous \[6, D\]"):
        combine_experts(torch.zeros(5, 4), routing, is_weighted=True)
