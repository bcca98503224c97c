"""Tests mixtures of experts: which experts a token takes, its independence of the batch, and the values in
config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.kernels.expert_routing import RoutingRule, group_by_expert, route_experts
from engine.kernels.layer_ops import TorchOps
from engine.layers.feed_forward import ExpertFeedForward
from engine.models.config import ModelConfig
from engine.models.expert_config import MIXTRAL, ExpertConfig
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.suite.examples import examples


@given(st.integers(1, 9), st.data())
@examples(60)
def test_grouping_keeps_every_pair_once_and_experts_together(num_experts: int, data: st.DataObject) -> None:
    rows = st.lists(st.permutations(range(num_experts)), min_size=0, max_size=12)
    num_chosen = data.draw(st.integers(1, num_experts))
    chosen = [row[:num_chosen] for row in data.draw(rows)]
    chosen_TC = torch.tensor(chosen, dtype=torch.int64).view(len(chosen), num_chosen)
    pair_X, start_E1 = group_by_expert(chosen_TC, num_experts)
    assert sorted(pair_X.tolist()) == list(range(len(chosen) * num_chosen))
    assert (start_E1[0], start_E1[-1]) == (0, len(pair_X))
    for expert in range(num_experts):
        mine = pair_X[start_E1[expert] : start_E1[expert + 1]].tolist()
        assert mine == [pair for pair, owner in enumerate(chosen_TC.flatten().tolist()) if owner == expert]


def choose(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None) -> Any:
    """Returns the first token's experts, and all weights."""
    routing = route_experts(logits_TE, rule, bias_E)
    return routing.chosen_TC[0].tolist(), routing.weight_TC


def test_the_likeliest_experts_are_chosen_and_weighted() -> None:
    logits_TE = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    chosen, weight_TC = choose(logits_TE, RoutingRule("softmax", 2))
    assert chosen == [1, 3]
    torch.testing.assert_close(weight_TC, logits_TE.softmax(-1)[:, [1, 3]])
    # Only the second of two pairs may be chosen from.
    logits_TE[0] = torch.tensor([2.5, 1.0, 3.0, 0.0])
    assert choose(logits_TE, RoutingRule("softmax", 2, num_groups=2))[0] == [2, 3]
    assert choose(logits_TE, RoutingRule("softmax", 2, num_groups=2, num_chosen_groups=2))[0] == [2, 0]
    logits_TE[0] = torch.tensor([0.0, 3.0, 1.0, 2.0])
    _, normalized_TC = choose(logits_TE, RoutingRule("softmax", 2, normalize=True, scaling=2.0))
    torch.testing.assert_close(normalized_TC, 2 * logits_TE[:, [1, 3]].softmax(-1))


def test_a_bias_affects_the_choice_of_experts_but_not_their_weights() -> None:
    logits_TE = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    scores_TE = logits_TE.sigmoid()
    bias_E = torch.tensor([-1.0, 0.5, 0.0, 0.6])
    chosen, weight_TC = choose(logits_TE, RoutingRule("sigmoid", 2), bias_E)
    assert chosen == [1, 3]
    torch.testing.assert_close(weight_TC, scores_TE[:, [1, 3]])
    # Groups rank by the sum of their two best, 0.38 and 1.6 with bias, so both of the second pair are chosen. The bias
    # alone would choose otherwise.
    assert choose(logits_TE, RoutingRule("sigmoid", 2, normalize=True, num_groups=2), bias_E)[0] == [3, 2]
    _, normalized_TC = choose(logits_TE, RoutingRule("sigmoid", 2, normalize=True), bias_E)
    torch.testing.assert_close(normalized_TC, weight_TC / weight_TC.sum())


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = make_checkpoint("deepseek_v3", tmp_path, num_hidden_layers=4)
    edit(folder, num_hidden_layers=3, num_nextn_predict_layers=1, num_mtp_layers=...)
    Engine.load(EngineConfig(model=str(folder), num_pages=4, page_size=8))
    assert (
        'has 1 layers that predict further tokens (MTP); decode.draft_model = "mtp" drafts with the first one'
        in caplog.text
    )
    edit(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"model.layers.3.* is not part of the model"):
        Engine.load(EngineConfig(model=str(folder), num_pages=4, page_size=8))


class RandomTensors:
    """Implements `LayerTensors` for a block with experts of 24 by 32."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def __call__(self, name: str) -> torch.Tensor:
        rows = self._num_experts if name == MIXTRAL.names.router else 32 if name.endswith("w2.weight") else 24
        return torch.randn(rows, 24 if rows == 32 else 32) * 0.3

    def weight(self, name: str, is_expert: bool = False) -> torch.Tensor:
        return self(name)


def make_block(num_experts: int = 6, num_chosen: int = 2) -> ExpertFeedForward:
    config = ExpertConfig(MIXTRAL.names, num_experts, num_chosen, 24, normalize=True, layers=frozenset({0}))
    return ExpertFeedForward(config, RandomTensors(num_experts))


def test_the_rest_of_a_batch_changes_a_token_only_by_rounding() -> None:
    """Compares it alone, in a batch, and in a batch that goes to the same experts: no token is dropped or sent
    elsewhere."""
    torch.manual_seed(3)
    block, ops = make_block(), TorchOps()
    batch_TD = torch.randn(64, 32)
    together_TD = block(batch_TD, ops)
    for token in range(64):
        alone_1D = block(batch_TD[token : token + 1], ops)
        torch.testing.assert_close(alone_1D[0], together_TD[token], rtol=1e-5, atol=1e-6)
    same_TD = batch_TD[:1].repeat(50, 1)
    torch.testing.assert_close(block(same_TD, ops), together_TD[:1].expand(50, -1), rtol=1e-5, atol=1e-6)


def test_batches_of_one_size_give_the_same_bits() -> None:
    """Each token's sum has its own order, so the other tokens of a batch and their experts do not matter."""
    torch.manual_seed(4)
    block, ops = make_block(num_experts=2), TorchOps()  # each token takes both experts: groups of one size
    x_TD = torch.randn(16, 32)
    others_TD = torch.randn(16, 32)
    others_TD[5] = x_TD[5]
    assert torch.equal(block(x_TD, ops)[5], block(others_TD, ops)[5])


def test_an_empty_batch_gives_an_empty_result() -> None:
    assert make_block()(torch.empty(0, 32), TorchOps()).shape == (0, 32)


def edit(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    data = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def test_config_json_says_which_layers_have_experts(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1])
    experts = ModelConfig.from_folder(folder).experts
    assert experts is not None
    assert experts.layers == {3, 5}
    assert (experts.num_experts, experts.num_chosen, experts.intermediate_size, experts.normalize) == (8, 3, 24, True)


def test_the_number_of_experts_has_two_spellings(tmp_path: Path) -> None:
    """Reads the spelling of published Qwen3-MoE files, which also have a key that nothing reads."""
    folder = make_checkpoint("qwen3_moe", tmp_path)
    before = ModelConfig.from_folder(folder).experts
    edit(folder, num_local_experts=..., num_experts=8, max_window_layers=48, router_aux_loss_coef=0.001)
    assert ModelConfig.from_folder(folder).experts == before


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is more than the 5 experts; give at most"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0: a positive whole number"),
        ("mixtral", {"num_experts": 7}, "num_local_experts = 5 and num_experts = 7 differ; keep one"),
        ("mixtral", {"norm_topk_prob": True}, "norm_topk_prob = True is unknown for MixtralForCausalLM"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers = \[2\]: a list of layers below 2"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers = 'all': a list"),
        ("qwen3_moe", {"decoder_sparse_step": -1}, "decoder_sparse_step = -1: a positive whole number"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'; give greedy or group_limited_greedy"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported; only 'softmax' is"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported; only 1 is"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 1},
            "topk_group = 1 of n_group = 6 of 6 experts do not hold the 2",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'; give noaux_tc"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; only 'sigmoid' is"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_group = 8 of 8 experts: a group is ranked by its two best"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is unknown for DeepseekV2ForCausalLM"),
        ("deepseek_v2", {"kv_lora_rank": 23}, "kv_lora_rank = 23 must be even"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads = 2: .* each of the 4 heads has its own"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias = True is unknown"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 is unknown"),
        ("glm4_moe", {"kv_lora_rank": 16}, "kv_lora_rank = 16 is unknown for Glm4MoeForCausalLM"),
        ("glm4_moe", {"partial_rotary_factor": 1.5, "rope_parameters": ...}, "partial_rotary_factor = 1.5: a number"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is unknown for Gemma3"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is unknown"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported; only 'gelu_pytorch"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping = 0: a positive number or null"),
        ("llama4_text", {"moe_layers": [4]}, r"moe_layers = \[4\]: a list of layers below 4"),
        ("llama4_text", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers = .*: a list of 4 values 0 or 1"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types = .* full_attention or chunked_atten"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size = 0: a positive whole number"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale = 0: a positive number"),
        ("llama4_text", {"n_shared_experts": 2}, "n_shared_experts = 2 is unknown for Llama4ForCausalLM"),
        (
            "llama4_text",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'yarn' is not supported for Llama4ForCausalLM",
        ),
        ("phi3", {"partial_rotary_factor": 0.2, "rope_parameters": ...}, "= 0.2 rotates 3 of 16 values of a head"),
    ],
)
def test_inconsistent_experts_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edit(make_checkpoint(family, tmp_path), **changes)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_folder(folder)


def test_a_mixtral_without_a_theta_gets_its_familys_default(tmp_path: Path) -> None:
    folder = edit(make_checkpoint("mixtral", tmp_path), rope_parameters=...)
    assert ModelConfig.from_folder(folder).rope.theta == 1e6
