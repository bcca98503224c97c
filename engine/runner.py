"""Runs the model over one batch: the only caller of a model's forward.

Knows nothing of requests, prefix caches or sampling. It reads and writes the pages that the batch names and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.batch import Batch
from engine.kernels import AttentionBackend
from engine.kernels.metadata import KvLayer
from engine.layers.ops import LayerOps
from engine.models.decoder import Decoder


class ModelRunner:
    """A model bound to its KV pages."""

    def __init__(
        self, model: Decoder, kv_layers: Sequence[KvLayer], attention: AttentionBackend, ops: LayerOps
    ) -> None:
        """`kv_layers`: the pool layer by layer."""
        self._model = model
        self._layer_pools = kv_layers
        self._attention = attention
        self._ops = ops
        self.stack = model.fuse(self._layer_pools, attention)

    @property
    def compiles(self) -> bool:
        """Whether steps of some kinds are computed by kernels that are compiled when they are first needed."""
        return getattr(self._attention, "own", self._attention).name == "triton"

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits [R, V] of the rows that draw; the batch's K/V are in the pages afterwards. Blocks on CPU.

        `on_layer`: see `Engine.step`."""
        torch.get_num_threads()  # gives a new thread its share of the cores before anything runs in parallel on it
        return self._model.forward(
            batch.token_ids_T,
            batch.positions_T,
            batch.draw_rows_R,
            batch.meta,
            self._layer_pools,
            self._attention,
            self._ops,
            on_layer,
            self.stack,
        )
