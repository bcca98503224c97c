"""Which part of each stored tensor a rank reads. Torch-free.

Products that widen (queries, keys, values, gate, up, embedding, head) are cut by rows, those that narrow again (output,
down) by columns: what the first make is what the second take, so a block needs one sum over the ranks, at its end. A
bias that is added to such a sum is read by one rank alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.model_config import ModelConfig
from engine.models.shapes import EMBEDDING, HEAD, LAYERS_PREFIX
from engine.shard import Shard, check_degree
from engine.weight_scheme import WeightScheme, int4_group
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """Places `start` to `stop` along dimension `dim`; or zeros of the whole shape, nothing read."""

    dim: int
    start: int
    stop: int
    zeros: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is read of a tensor of that shape."""
        if self.zeros:
            return whole
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])


Cuts = dict[str, Cut]


def tensor_cuts(config: ModelConfig, shard: Shard) -> Cuts:
    """By name, of the tensors that are not read whole. `config` is of the whole model. Raises ConfigError."""
    if shard.num_ranks == 1:
        return {}
    check_degree(config, shard.num_ranks)
    vocabulary = shard.span(config.vocab_size)
    cuts: Cuts = {name: _rows(vocabulary) for name in (EMBEDDING, HEAD)}
    for layer in range(config.num_layers):
        of_layer = {**_attention_cuts(config, shard), **_feed_forward_cuts(config, layer, shard)}
        cuts.update({f"{LAYERS_PREFIX}{layer}.{name}": cut for name, cut in of_layer.items()})
    return cuts


def check_groups(
    cuts: Mapping[str, Cut],
    shapes: Mapping[str, tuple[int, ...]],
    scheme: WeightScheme | None,
    stored: Collection[str],
    quantization: str | None,
) -> None:
    """Raises ConfigError where a rank's part of a quantized product begins or ends inside a group of inputs that share
    a scale: it could be had dequantized alone, at several times the memory. `stored`: paths of those that the
    checkpoint has quantized; `quantization` is what the others are quantized to while they are loaded."""
    for name, cut in cuts.items():
        inputs, is_stored = shapes.get(name, (0,))[-1], name.removesuffix(".weight") in stored
        if cut.dim == 0 or cut.zeros or not (is_stored or quantization == "int4"):
            continue
        group = scheme.group_of(inputs) if scheme is not None and is_stored else int4_group(inputs)
        if group >= inputs or not (cut.start % group or cut.stop % group):
            continue
        own = cut.stop - cut.start
        fix = f"weights in groups that divide {own}" if is_stored else "engine.quantization = int8, which scales rows"
        raise ConfigError(
            f"engine.tensor_parallel = {inputs // own} gives a rank {own} of the {inputs} inputs of {name}, which cuts "
            f"its groups of {group} that share a scale; give a number of ranks that leaves each a multiple of {group}, "
            f"or {fix}"
        )


def _attention_cuts(config: ModelConfig, shard: Shard) -> Cuts:
    heads = shard.span(config.num_heads)
    latent = config.latent
    if latent is not None:
        query = "q_proj" if latent.q_rank is None else "q_b_proj"
        return {
            f"self_attn.{query}.weight": _rows(heads, latent.query_dim),
            "self_attn.kv_b_proj.weight": _rows(heads, latent.nope_dim + latent.v_dim),
            "self_attn.o_proj.weight": _columns(heads, latent.v_dim),
        }
    kv_heads = shard.kv_heads(config.num_kv_heads)
    cuts: Cuts = {}
    for name, span in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        for kind in ("weight", "bias"):
            cuts[f"self_attn.{name}_proj.{kind}"] = _rows(span, config.head_dim)
    cuts["self_attn.o_proj.weight"] = _columns(heads, config.head_dim)
    return cuts | _summed_bias("self_attn.o_proj", shard)


def _feed_forward_cuts(config: ModelConfig, layer: int, shard: Shard) -> Cuts:
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return _block_cuts("mlp", shard.span(config.intermediate_size), shard)
    cuts: Cuts = {}
    if experts.shared_size:
        cuts |= _block_cuts(experts.names.shared, shard.span(experts.shared_size), shard)
    inner = shard.span(experts.intermediate_size)
    for expert in range(experts.num_experts):
        gate, up, down = experts.names.of(expert)
        cuts |= {gate: _rows(inner), up: _rows(inner), down: _columns(inner)}
    return cuts


def _block_cuts(block: str, inner: range, shard: Shard) -> Cuts:
    cuts: Cuts = {f"{block}.{name}_proj.{kind}": _rows(inner) for name in ("gate", "up") for kind in ("weight", "bias")}
    cuts[f"{block}.down_proj.weight"] = _columns(inner)
    return cuts | _summed_bias(f"{block}.down_proj", shard)


def _summed_bias(path: str, shard: Shard) -> Cuts:
    return {f"{path}.bias": Cut(0, 0, 0, zeros=True)} if shard.rank else {}


def _rows(span: range, width: int = 1) -> Cut:
    return Cut(0, span.start * width, span.stop * width)


def _columns(span: range, width: int = 1) -> Cut:
    return Cut(1, span.start * width, span.stop * width)
