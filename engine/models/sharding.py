"""Splits a model's stored tensors among the ranks of a tensor-parallel worker. Torch-free.

Weights that widen (queries, keys, values, gate, up, embedding, head) are split by rows, and weights that narrow again
(output, down) by columns. The outputs of the former are the inputs of the latter, so a block needs a single sum over
the ranks, at its end. Only rank 0 reads a bias that is added to such a sum. With expert parallelism a rank reads some
experts whole, and the same sum joins the outputs of a token's experts.
"""

from __future__ import annotations

from engine.models.config import ModelConfig
from engine.models.expert_config import MXFP4_GROUP, ExpertConfig
from engine.models.shapes import EMBEDDING, HEAD, LAYERS_PREFIX
from engine.parallel.shard import Shard, check_degree
from engine.weights.tensor_slices import ABSENT, TensorSlice, TensorSlices


def tensor_slices(config: ModelConfig, shard: Shard) -> TensorSlices:
    """Returns the slices of this rank by tensor name; tensors without an entry are read whole. `config` describes the
    whole model. Raises ConfigError for a number of ranks that does not divide it."""
    if shard.num_ranks == 1:
        return {}
    check_degree(config, shard)
    vocabulary = shard.span(config.vocab_size)
    slices: TensorSlices = {name: _rows(vocabulary) for name in (EMBEDDING, HEAD)}
    for layer in range(config.num_layers):
        of_layer = {**_attention_slices(config, shard), **_feed_forward_slices(config, layer, shard)}
        slices.update({f"{LAYERS_PREFIX}{layer}.{name}": part for name, part in of_layer.items()})
    return slices


def _attention_slices(config: ModelConfig, shard: Shard) -> TensorSlices:
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
    slices: TensorSlices = {}
    if config.family.fused_products:
        slices["self_attn.qkv_proj.weight"] = _fused_projection(config, heads, kv_heads)
    for name, span in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        for kind in ("weight", "bias"):
            slices[f"self_attn.{name}_proj.{kind}"] = _rows(span, config.head_dim)
        if config.family.wide_qk_norm:
            slices[f"self_attn.{name}_norm.weight"] = _rows(span, config.head_dim)
    slices["self_attn.o_proj.weight"] = _columns(heads, config.head_dim)
    if config.family.sinks:
        slices["self_attn.sinks"] = _rows(heads)
    return slices | _summed_bias("self_attn.o_proj", shard)


def _fused_projection(config: ModelConfig, heads: range, kv_heads: range) -> TensorSlice:
    """Returns the rows of the rank's queries, keys and values in the tensor that stores all of them."""
    width = config.head_dim
    first_k = config.num_heads * width
    first_v = first_k + config.num_kv_heads * width
    more = [(first + kv_heads.start * width, first + kv_heads.stop * width) for first in (first_k, first_v)]
    return TensorSlice(0, heads.start * width, heads.stop * width, more=tuple(more))


def _feed_forward_slices(config: ModelConfig, layer: int, shard: Shard) -> TensorSlices:
    experts = config.experts
    if experts is None or layer not in experts.layers:
        inner = shard.span(config.intermediate_size)
        slices = _block_slices(config.family.dense_block, inner, shard)
        if config.family.fused_products:
            both = (config.intermediate_size + inner.start, config.intermediate_size + inner.stop)
            slices[f"{config.family.dense_block}.gate_up_proj.weight"] = TensorSlice(
                0, inner.start, inner.stop, more=(both,)
            )
        return slices
    slices = {}
    if experts.shared_size:
        slices |= _block_slices(experts.names.shared, shard.span(experts.shared_size), shard)
    if shard.has_whole_experts:
        return slices | _whole_expert_slices(experts, shard.span(experts.num_experts))
    inner = shard.span(experts.intermediate_size)
    if experts.names.is_stacked:
        return slices | _stacked_slices(experts, inner, shard)
    for expert in range(experts.num_experts):
        gate, up, down = experts.names.of(expert)
        slices |= {gate: _rows(inner), up: _rows(inner), down: _columns(inner)}
    return slices


def _whole_expert_slices(experts: ExpertConfig, own: range) -> TensorSlices:
    names = experts.names
    if not names.is_stacked:
        return {name: ABSENT for expert in range(experts.num_experts) if expert not in own for name in names.of(expert)}
    products = ("gate_up_proj", "down_proj")
    stacked = [name for product in products for name in names.stored(product, experts.mxfp4)]
    if names.has_bias:
        stacked += [names.stacked_bias(product) for product in products]
    return {name: _rows(own) for name in stacked}


def _stacked_slices(experts: ExpertConfig, inner: range, shard: Shard) -> TensorSlices:
    names, mxfp4 = experts.names, experts.mxfp4
    if not names.has_bias:
        first_up = experts.intermediate_size
        ups = (first_up + inner.start, first_up + inner.stop)
        return {
            names.stored("gate_up_proj", mxfp4)[0]: TensorSlice(2, inner.start, inner.stop, more=(ups,)),
            names.stored("down_proj", mxfp4)[0]: TensorSlice(1, inner.start, inner.stop),
        }
    both = (2 * inner.start, 2 * inner.stop)  # gates and ups alternate
    slices: TensorSlices = {names.stacked_bias("gate_up_proj"): TensorSlice(1, *both)}
    width = MXFP4_GROUP if mxfp4 else 1
    for name in names.stored("gate_up_proj", mxfp4):
        slices[name] = TensorSlice(1 if mxfp4 else 2, *both)
    for name in names.stored("down_proj", mxfp4):
        slices[name] = TensorSlice(2 if mxfp4 else 1, inner.start // width, inner.stop // width)
    if shard.rank:
        slices[names.stacked_bias("down_proj")] = TensorSlice(0, 0, 0, zeros=True)
    return slices


def _block_slices(block: str, inner: range, shard: Shard) -> TensorSlices:
    slices: TensorSlices = {
        f"{block}.{name}_proj.{kind}": _rows(inner) for name in ("gate", "up") for kind in ("weight", "bias")
    }
    slices[f"{block}.down_proj.weight"] = _columns(inner)
    return slices | _summed_bias(f"{block}.down_proj", shard)


def _summed_bias(path: str, shard: Shard) -> TensorSlices:
    return {f"{path}.bias": TensorSlice(0, 0, 0, zeros=True)} if shard.rank else {}


def _rows(span: range, width: int = 1) -> TensorSlice:
    return TensorSlice(0, span.start * width, span.stop * width)


def _columns(span: range, width: int = 1) -> TensorSlice:
    return TensorSlice(1, span.start * width, span.stop * width)
