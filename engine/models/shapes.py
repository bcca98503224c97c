"""Lists the name and shape of every tensor of a model, as its checkpoint must store them. Torch-free.

`engine.models.loader` reads the tensors, `engine.memory.plan` only counts them.
"""

from __future__ import annotations

from engine.models.config import ModelConfig
from engine.models.expert_config import MXFP4_GROUP, ExpertConfig
from engine.models.latent_config import LatentConfig

LAYERS_PREFIX = "model.layers."
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_IMAGE_PARTS = {"vision_tower.", "vision_model.", "multi_modal_projector."}

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Returns the shape of every tensor that the checkpoint must hold, by name."""
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update({f"{LAYERS_PREFIX}{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()})
    return shapes


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Returns the shape of every tensor of a layer, by its name within the layer."""
    return {**_attention_shapes(config), **_feed_forward_shapes(config, layer)}


def product_shapes(config: ModelConfig, with_experts: bool = True) -> dict[str, tuple[int, int]]:
    """Returns the shapes of weights that may stay quantized: not those that latent attention rearranges, routers and
    the head."""
    rearranged = ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", *(("self_attn.q_proj",) if config.latent else ()))
    found: dict[str, tuple[int, int]] = {}
    for name, shape in tensor_shapes(config).items():
        is_expert = ".experts." in name
        if (
            len(shape) != 2
            or not name.startswith(LAYERS_PREFIX)
            or not name.endswith(".weight")
            or any(f"{part}." in name for part in rearranged)
        ):
            continue
        if (is_expert and with_experts) or (name.endswith("_proj.weight") and not is_expert):
            found[name] = (shape[0], shape[1])
    return found


def optional_tensors(config: ModelConfig) -> frozenset[str]:
    """Returns tensors that may be stored but are not read: a tied head, because it is the embedding, layers after the
    last, because they predict further tokens, and what reads images. Entries are names or, with a dot at the end,
    prefixes of names."""
    further = range(config.num_layers, config.num_layers + config.num_prediction_layers)
    unread = {f"{LAYERS_PREFIX}{layer}." for layer in further}
    if config.tie_embeddings:
        unread.add(HEAD)
    if config.has_image_parts:
        unread |= _IMAGE_PARTS | {f"model.{part}" for part in _IMAGE_PARTS}
    return frozenset(unread)


def _attention_shapes(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in config.family.norms if name is not None}
    widths = {"q": q_width, "k": kv_width, "v": kv_width}
    if config.family.fused_products:
        widths = {"qkv": q_width + 2 * kv_width}
    for name, width in widths.items():
        _add_product(shapes, f"self_attn.{name}_proj", width, hidden, has_bias=config.qkv_bias)
    _add_product(shapes, "self_attn.o_proj", hidden, q_width, has_bias=config.o_bias)
    if config.qk_norm:
        is_wide = config.family.wide_qk_norm
        shapes["self_attn.q_norm.weight"] = (q_width if is_wide else config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv_width if is_wide else config.head_dim,)
    if config.family.sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    return shapes


def _latent_shapes(config: ModelConfig, latent: LatentConfig) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (latent.rank + latent.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.nope_dim + latent.v_dim), latent.rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.v_dim),
    }
    if latent.q_rank is None:
        return shapes | {"self_attn.q_proj.weight": (heads * latent.query_dim, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (latent.q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (latent.q_rank,),
        "self_attn.q_b_proj.weight": (heads * latent.query_dim, latent.q_rank),
    }


def _feed_forward_shapes(config: ModelConfig, layer: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {}
    experts = config.experts
    if experts is None or layer not in experts.layers:
        block = config.family.dense_block
        if config.family.fused_products:
            _add_product(shapes, f"{block}.gate_up_proj", 2 * inner, hidden, has_bias=config.mlp_bias)
        else:
            _add_product(shapes, f"{block}.gate_proj", inner, hidden, has_bias=config.mlp_bias)
            _add_product(shapes, f"{block}.up_proj", inner, hidden, has_bias=config.mlp_bias)
        _add_product(shapes, f"{block}.down_proj", hidden, inner, has_bias=config.mlp_bias)
        return shapes
    shapes[experts.names.router] = (experts.num_experts, hidden)
    if experts.sigmoid:
        shapes[experts.names.router_bias] = (experts.num_experts,)
    if experts.shared_size:
        for name in ("gate", "up"):
            _add_product(shapes, f"{experts.names.shared}.{name}_proj", experts.shared_size, hidden, has_bias=False)
        _add_product(shapes, f"{experts.names.shared}.down_proj", hidden, experts.shared_size, has_bias=False)
    if experts.names.is_stacked:
        return shapes | _stacked_shapes(experts, hidden)
    for expert in range(experts.num_experts):
        gate, up, down = experts.names.of(expert)
        shapes[gate] = shapes[up] = (experts.intermediate_size, hidden)
        shapes[down] = (hidden, experts.intermediate_size)
    return shapes


def _stacked_shapes(experts: ExpertConfig, hidden: int) -> Shapes:
    names, count, inner = experts.names, experts.num_experts, experts.intermediate_size
    shapes: Shapes = {names.router_shift: (count,)} if names.has_bias else {}
    for product, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        if names.has_bias:
            shapes[names.stacked_bias(product)] = (count, outputs)
        stored = names.stored(product, experts.mxfp4)
        if experts.mxfp4:
            groups = inputs // MXFP4_GROUP
            shapes[stored[0]], shapes[stored[1]] = (count, outputs, groups, MXFP4_GROUP // 2), (count, outputs, groups)
        else:
            shapes[stored[0]] = (count, inputs, outputs)
    return shapes


def _add_product(shapes: Shapes, name: str, rows: int, columns: int, *, has_bias: bool) -> None:
    shapes[f"{name}.weight"] = (rows, columns)
    if has_bias:
        shapes[f"{name}.bias"] = (rows,)
