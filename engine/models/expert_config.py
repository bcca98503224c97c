"""Parses the mixture of experts in `config.json`: how many experts there are, how many a token takes, in which layers.

`engine.models.config` reads it once while a model loads. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.models.config_fields import positive_int
from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names that a family gives an expert layer's tensors below `model.layers.N.`."""

    block: str
    gate: str
    up: str
    down: str
    shared: str = ""  # the block that every token also passes, if there is one
    gate_block: str = "gate"  # the router
    is_stacked: bool = False  # all experts of a layer are one tensor
    has_bias: bool = False  # stacked experts and their router have biases, and gates and ups alternate

    def of(self, expert: int) -> tuple[str, str, str]:
        prefix = f"{self.block}.experts.{expert}"
        return f"{prefix}.{self.gate}.weight", f"{prefix}.{self.up}.weight", f"{prefix}.{self.down}.weight"

    @property
    def router(self) -> str:
        return f"{self.block}.{self.gate_block}.weight"

    @property
    def router_shift(self) -> str:
        """The bias that is added to the router's product."""
        return f"{self.block}.{self.gate_block}.bias"

    def stored(self, product: str, mxfp4: bool) -> tuple[str, ...]:
        """Returns the tensors that hold a product of all stacked experts: values, or blocks of codes and scales."""
        name = f"{self.block}.experts.{product}"
        return (f"{name}_blocks", f"{name}_scales") if mxfp4 else (name,)

    def stacked_bias(self, product: str) -> str:
        return f"{self.block}.experts.{product}_bias"

    @property
    def router_bias(self) -> str:
        return f"{self.block}.gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """The properties that distinguish a family's experts. Defaults are those of its published configs."""

    names: ExpertNames
    num_experts: int
    num_chosen: int
    inner_key: str
    normalize: Literal["always", "configured", "never"]  # whether the chosen experts' weights are scaled to a sum of 1
    num_shared: int = 0  # experts that every token passes
    float32_router: bool = False
    sigmoid: bool = False  # sigmoid scores instead of a softmax, with a bias that affects the choice, not the weights
    normalizes: bool = False  # the default of "configured"
    num_groups: int = 1
    num_chosen_groups: int = 1
    scales_inputs: bool = False  # by the sigmoids of their scores; outputs are summed as they are


# A Qwen3-MoE's file may have either of the first two: `transformers` writes the first since its version 5.
_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_COMMON_KEYS = frozenset({*_COUNT_KEYS, "num_experts_per_tok"})
# Used only in training: an auxiliary loss, and noise on the router's input.
_TRAINING_KEYS = frozenset(
    {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux"}
)
EXPERT_KEYS = _COMMON_KEYS | _TRAINING_KEYS
DEEPSEEK_KEYS = frozenset({
    "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace", "moe_layer_freq", "routed_scaling_factor",
    "topk_method", "scoring_func", "n_group", "topk_group", "ep_size",
})  # fmt: skip
STACKED_KEYS = frozenset({"swiglu_limit", "swiglu_alpha", "experts_per_token"})
SPARSITY_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"})

MIXTRAL = ExpertFamily(ExpertNames("block_sparse_moe", "w1", "w3", "w2"), 8, 2, "intermediate_size", "always")
QWEN3_MOE = ExpertFamily(
    ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"), 128, 8, "moe_intermediate_size", "configured"
)
DEEPSEEK_V2 = ExpertFamily(
    ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "mlp.shared_experts"),
    64,
    6,
    "moe_intermediate_size",
    "never",
    num_shared=2,
    float32_router=True,
)
DEEPSEEK_V3 = ExpertFamily(
    DEEPSEEK_V2.names,
    256,
    8,
    "moe_intermediate_size",
    "configured",
    num_shared=1,
    float32_router=True,
    sigmoid=True,
    normalizes=True,
    num_groups=8,
    num_chosen_groups=4,
)
GLM4_MOE = replace(DEEPSEEK_V3, num_experts=128, num_groups=1, num_chosen_groups=1)

GPT_OSS = ExpertFamily(
    ExpertNames("mlp", "", "", "", gate_block="router", is_stacked=True, has_bias=True),
    128,
    4,
    "intermediate_size",
    "always",
)
LLAMA4 = ExpertFamily(
    ExpertNames("feed_forward", "", "", "", "feed_forward.shared_expert", gate_block="router", is_stacked=True),
    16,
    1,
    "intermediate_size",
    "never",
    num_shared=1,
    scales_inputs=True,
)
LLAMA4_KEYS = frozenset({"moe_layers", "interleave_moe_layer_step"})
MXFP4_GROUP = 32  # inputs that share a scale


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    names: ExpertNames
    num_experts: int
    num_chosen: int  # experts of each token
    intermediate_size: int  # of one expert
    normalize: bool  # the chosen experts' weights sum to 1
    layers: frozenset[int]  # the layers with experts; the others have a dense block
    shared_size: int = 0  # of the block that every token also passes
    scaling: float = 1.0  # of the chosen experts' weights
    num_groups: int = 1
    num_chosen_groups: int = 1  # groups that a token's experts may come from
    float32_router: bool = False
    sigmoid: bool = False
    scales_inputs: bool = False
    swiglu: tuple[float, float] | None = None  # limit and alpha of a clamped SwiGLU; None: silu
    mxfp4: bool = False  # stacked experts are stored in MXFP4
    own_experts: range | None = None  # those of this rank, if experts are divided among ranks

    @property
    def held(self) -> range:
        """The experts whose weights this rank holds."""
        return range(self.num_experts) if self.own_experts is None else self.own_experts


def parse_experts(data: Mapping[str, Any], family: ExpertFamily, num_layers: int, file: Path) -> ExpertConfig:
    """Parses the experts. Raises CheckpointError for inconsistent or unsupported values."""
    counts = {key: data[key] for key in _COUNT_KEYS if data.get(key) is not None}
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"{file}: {' and '.join(f'{k} = {v!r}' for k, v in counts.items())} differ; keep one")
    num_experts = positive_int(data, next(iter(counts), _COUNT_KEYS[0]), file, family.num_experts)
    num_chosen = positive_int(data, "num_experts_per_tok", file, family.num_chosen)
    if num_chosen > num_experts:
        raise CheckpointError(
            f"{file}: num_experts_per_tok = {num_chosen} is more than the {num_experts} experts; give at most that"
        )
    inner = positive_int(data, family.inner_key, file, 768)
    if data.get("experts_per_token", num_chosen) != num_chosen:
        raise CheckpointError(
            f"{file}: experts_per_token = {data['experts_per_token']!r} and num_experts_per_tok = {num_chosen} differ; "
            "keep one"
        )
    groups = _groups(data, family, num_experts, num_chosen, file)
    return ExpertConfig(
        names=family.names,
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=inner,
        normalize=family.normalize == "always"
        or (family.normalize == "configured" and bool(data.get("norm_topk_prob", family.normalizes))),
        layers=_expert_layers(data, num_layers, file),
        shared_size=inner * positive_int(data, "n_shared_experts", file, family.num_shared) if family.num_shared else 0,
        scaling=float(data.get("routed_scaling_factor") or 1.0),
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        float32_router=family.float32_router,
        sigmoid=family.sigmoid,
        scales_inputs=family.scales_inputs,
        swiglu=_swiglu(data, file) if family.names.has_bias else None,
        mxfp4=_is_mxfp4(data, family, inner, file),
    )


def _swiglu(data: Mapping[str, Any], file: Path) -> tuple[float, float]:
    limit, alpha = data.get("swiglu_limit", 7.0), data.get("swiglu_alpha", 1.702)
    for key, value in (("swiglu_limit", limit), ("swiglu_alpha", alpha)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{file}: {key} = {value!r}: a positive number is needed")
    return float(limit), float(alpha)


def _is_mxfp4(data: Mapping[str, Any], family: ExpertFamily, inner: int, file: Path) -> bool:
    scheme = data.get("quantization_config")
    if not family.names.has_bias or not isinstance(scheme, Mapping) or scheme.get("quant_method") != "mxfp4":
        return False
    for key, width in (("intermediate_size", inner), ("hidden_size", positive_int(data, "hidden_size", file))):
        if width % MXFP4_GROUP:
            raise CheckpointError(f"{file}: {key} = {width}: MXFP4 needs a multiple of {MXFP4_GROUP}")
    return True


def _groups(
    data: Mapping[str, Any], family: ExpertFamily, num_experts: int, num_chosen: int, file: Path
) -> tuple[int, int]:
    """Returns how many groups of experts there are, and from how many a token's experts may come."""
    for key, known in (("moe_layer_freq", 1), ("scoring_func", "sigmoid" if family.sigmoid else "softmax")):
        if data.get(key, known) != known:
            raise CheckpointError(f"{file}: {key} = {data[key]!r} is not supported; only {known!r} is")
    methods = ("noaux_tc",) if family.sigmoid else ("greedy", "group_limited_greedy")
    method = data.get("topk_method") or methods[0]
    if method not in methods:
        raise CheckpointError(f"{file}: topk_method = {method!r}; give {' or '.join(methods)}")
    if method == "greedy":
        return 1, 1
    defaults = (family.num_groups, family.num_chosen_groups)
    groups, chosen = (
        positive_int(data, key, file, default) for key, default in zip(("n_group", "topk_group"), defaults, strict=True)
    )
    if family.sigmoid and num_experts < 2 * groups:
        raise CheckpointError(
            f"{file}: n_group = {groups} of {num_experts} experts: a group is ranked by its two best, give fewer groups"
        )
    if num_experts % groups or chosen > groups or chosen * (num_experts // groups) < num_chosen:
        raise CheckpointError(
            f"{file}: topk_group = {chosen} of n_group = {groups} of {num_experts} experts do not hold the "
            f"{num_chosen} that a token takes; give groups of one size, and enough of them"
        )
    return groups, chosen


def _expert_layers(data: Mapping[str, Any], num_layers: int, file: Path) -> frozenset[int]:
    dense = data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in dense):
        raise CheckpointError(f"{file}: mlp_only_layers = {dense!r}: a list of layers below {num_layers} is needed")
    named = data.get("moe_layers")
    if named is not None:
        if not isinstance(named, list) or not all(
            isinstance(layer, int) and 0 <= layer < num_layers for layer in named
        ):
            raise CheckpointError(f"{file}: moe_layers = {named!r}: a list of layers below {num_layers} is needed")
        return frozenset(named)
    step = positive_int(data, "decoder_sparse_step", file, positive_int(data, "interleave_moe_layer_step", file, 1))
    first = data.get("first_k_dense_replace") or 0
    return frozenset(layer for layer in range(first, num_layers) if (layer + 1) % step == 0 and layer not in dense)
