"""Holds the slots of one rank: stacked matrices for every product that adapters may change, and one step's view of
them.

It owns the tensors. `engine.adapters.slot_policy` decides which adapter is in which slot; a slot is written only while
no sequence uses it.

Shapes: `S` slots, `R` rank of a slot, `P` parts, `I` in, `O` out, `T` rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.adapters.checkpoint import AdapterTensors
from engine.adapters.products import QKV, AdaptedProduct, ProductPart, adapted_products
from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.layer_ops import LayerOps
from engine.layers.attention import projection_rows
from engine.layers.rope import rotary_order
from engine.models.config import ModelConfig
from engine.parallel.shard import WHOLE, Shard, shard_model
from engine.weights.tensor_slices import TensorSlice


class AdapterStore:
    """Holds the matrices of every slot on one rank. `num_slots` includes the empty slot 0, whose matrices stay 0."""

    def __init__(
        self,
        model: ModelConfig,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        """Allocates every slot. `model` is the whole model. Raises ConfigError if it takes no adapters."""
        self.num_slots, self.rank = num_slots, rank
        self.products = adapted_products(model, shard)
        own = shard_model(model, shard)
        order_H = rotary_order(model.rope, model.head_dim)
        self._qkv_order: torch.Tensor | None = None
        if order_H is not None:
            self._qkv_order = projection_rows(own.num_heads, own.num_kv_heads, own.head_dim, order_H)
        self._weights = [self._allocate(product, dtype, device) for product in self.products]
        self.by_layer: list[dict[str, AdapterWeights]] = [{} for _ in range(model.num_layers)]  # by product's name
        for product, weights in zip(self.products, self._weights, strict=True):
            self.by_layer[product.layer][product.name] = weights

    def _allocate(self, product: AdaptedProduct, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
        ends, end = [], 0
        for part in product.parts:
            end += part.own[0]
            ends.append(end)
        return AdapterWeights.zeros(self.num_slots, self.rank, product.num_inputs, ends, dtype, device)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._weights)

    @torch.inference_mode()
    def write(self, slot: int, tensors: AdapterTensors) -> None:
        """Fills a slot that no step reads; parts that the adapter does not change become 0."""
        assert 0 < slot < self.num_slots
        for product, weights in zip(self.products, self._weights, strict=True):
            self._write_product(slot, product, weights, tensors)

    def _write_product(
        self, slot: int, product: AdaptedProduct, weights: AdapterWeights, tensors: AdapterTensors
    ) -> None:
        weights.down_SQI[slot].zero_()
        up_RO = weights.up_NSGWK.new_zeros((self.rank, product.num_outputs))
        begin = 0
        for index, (part, end) in enumerate(zip(product.parts, weights.part_ends, strict=True)):
            pair = tensors.get(part.module)
            weights.ranks_SP[slot, index] = 0 if pair is None else pair[0].shape[0]
            if pair is not None:
                down_RI, up_OR = _own_part(part, *pair)
                first, rank = index * self.rank, down_RI.shape[0]
                weights.down_SQI[slot, first : first + rank] = down_RI.to(weights.down_SQI)
                up_RO[:rank, begin:end] = up_OR.T.to(up_RO)
            begin = end
        if product.name == QKV and self._qkv_order is not None:
            # In the model's order; heads keep their places, so parts stay where they are.
            up_RO = up_RO.index_select(1, self._qkv_order.to(up_RO.device))
        weights.write_up(slot, up_RO)

    def step(self, slot_T: torch.Tensor, ops: LayerOps) -> StepAdapters:
        return StepAdapters(self.by_layer, ops, ops.adapter_rows(slot_T, self.num_slots), self.num_slots)


class StepAdapters:
    """The adapters of one step's rows."""

    def __init__(
        self, by_layer: Sequence[dict[str, AdapterWeights]], ops: LayerOps, rows: AdapterRows, num_slots: int
    ) -> None:
        self._by_layer = by_layer
        self._ops = ops
        self._rows = rows
        self._num_slots = num_slots

    @property
    def slot_T(self) -> torch.Tensor:
        return self._rows.slot_T

    def select(self, rows_R: torch.Tensor) -> StepAdapters:
        """Returns the adapters of only these rows."""
        rows = self._ops.adapter_rows(self._rows.slot_T[rows_R], self._num_slots)
        return StepAdapters(self._by_layer, self._ops, rows, self._num_slots)

    def layer(self, index: int) -> LayerAdapters:
        return LayerAdapters(self._by_layer[index], self._ops, self._rows)


class LayerAdapters:
    """The adapters of a step's rows at one layer; see `engine.layers.adapted`."""

    def __init__(self, products: dict[str, AdapterWeights], ops: LayerOps, rows: AdapterRows) -> None:
        self._products = products
        self._ops = ops
        self._rows = rows

    def add(self, product: str, y_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        weights = self._products.get(product)
        if weights is not None:
            self._ops.add_adapters(y_TO, x_TI, weights, self._rows)


def _own_part(part: ProductPart, down_RI: torch.Tensor, up_OR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the part that this rank multiplies by: its inputs of A or its outputs of B."""
    if part.slice is None:
        return down_RI, up_OR
    if part.slice.dim == 0:
        return down_RI, _take(up_OR, part.slice, 0)
    return _take(down_RI, part.slice, 1), up_OR


def _take(matrix: torch.Tensor, cut: TensorSlice, dim: int) -> torch.Tensor:
    return torch.cat([matrix.narrow(dim, start, stop - start) for start, stop in cut.spans], dim)
