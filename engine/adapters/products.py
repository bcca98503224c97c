"""Lists the products of a model that adapters may change: the stored weights that each combines, and its shape on one
rank.

Torch-free. A layer computes several stored weights as one product (queries, keys and values; gate and up); each is a
part of it, with its own range of the product's outputs and its own adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.kv_layout import DTYPE_BYTES
from engine.models.config import ModelConfig
from engine.models.shapes import LAYERS_PREFIX, tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.shard import WHOLE, Shard
from engine.weights.tensor_slices import TensorSlice
from penstock.config import EngineConfig
from penstock.errors import ConfigError

QKV, OUT, GATE_UP, DOWN = "qkv", "out", "gate_up", "down"


@dataclass(frozen=True, slots=True)
class ProductPart:
    """A stored weight of a product."""

    module: str  # "model.layers.0.self_attn.q_proj", as adapters name it
    whole: tuple[int, int]  # outputs and inputs of the whole model's weight
    own: tuple[int, int]  # of this rank's part of it
    slice: TensorSlice | None  # that part; None: all of it


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A product of one layer."""

    layer: int
    name: str  # QKV, OUT, GATE_UP or DOWN
    parts: tuple[ProductPart, ...]

    @property
    def num_inputs(self) -> int:
        return self.parts[0].own[1]

    @property
    def num_outputs(self) -> int:
        return sum(part.own[0] for part in self.parts)


def adapted_products(model: ModelConfig, shard: Shard = WHOLE) -> list[AdaptedProduct]:
    """Returns every product that adapters may change. Raises ConfigError for a model that takes no adapters."""
    if model.latent is not None:
        raise ConfigError(
            "engine.max_adapters: models with latent attention (DeepSeek) take no adapters; give "
            "engine.max_adapters = 0"
        )
    shapes, slices = tensor_shapes(model), tensor_slices(model, shard)
    is_fused = model.family.fused_products
    attention = {QKV: ["qkv_proj"] if is_fused else ["q_proj", "k_proj", "v_proj"], OUT: ["o_proj"]}
    mlp = {GATE_UP: ["gate_up_proj"] if is_fused else ["gate_proj", "up_proj"], DOWN: ["down_proj"]}
    found: list[AdaptedProduct] = []
    for layer in range(model.num_layers):
        blocks = [("self_attn", attention)]
        if model.experts is None or layer not in model.experts.layers:
            blocks.append((model.family.dense_block, mlp))
        for block, products in blocks:
            for name, stored in products.items():
                modules = [f"{LAYERS_PREFIX}{layer}.{block}.{each}" for each in stored]
                parts = tuple(
                    _part(module, shapes[f"{module}.weight"], slices.get(f"{module}.weight")) for module in modules
                )
                found.append(AdaptedProduct(layer, name, parts))
    return found


def _part(module: str, shape: tuple[int, ...], cut: TensorSlice | None) -> ProductPart:
    whole = (shape[0], shape[1])
    own = cut.shape(whole) if cut is not None else whole
    return ProductPart(module, whole, (own[0], own[1]), cut)


def adapter_bytes(config: EngineConfig, model: ModelConfig, dtype: str, device_type: str, shard: Shard = WHOLE) -> int:
    """Returns the size of all slots on one rank, including the empty slot; 0 if adapters are off."""
    if not config.max_adapters:
        return 0
    rank, values = config.max_adapter_rank, 0
    # CPUs have B in whole blocks of outputs and whole words of ranks (engine/kernels/adapter_weights.py).
    block, per_word = (16, 4 // DTYPE_BYTES[dtype]) if device_type == "cpu" else (1, 1)
    for product in adapted_products(model, shard):
        values += rank * len(product.parts) * product.num_inputs
        values += -(-rank // per_word) * per_word * -(-product.num_outputs // block) * block
    return (config.max_adapters + 1) * values * DTYPE_BYTES[dtype]
