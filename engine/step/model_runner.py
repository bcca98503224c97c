"""Runs the model over one batch. It is the only caller of a model's forward.

It knows nothing of requests, prefix caches or sampling, and reads and writes only the pages that the batch names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.adapters.slot_store import AdapterStore
from engine.kernels.attention_interface import AttentionBackend, KvLayer
from engine.kernels.layer_ops import LayerOps
from engine.models.decoder import Decoder
from engine.step.batch import Batch, ForwardOutput


class ModelRunner:
    """A model bound to its KV pages."""

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[KvLayer],
        attention: AttentionBackend,
        ops: LayerOps,
        adapters: AdapterStore | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        """`kv_layers` is the pool, layer by layer; `adapters` are required by batches that name any. `is_whole` says
        that all layers have the same page tables."""
        self._layer_pools = kv_layers
        self._is_whole = is_whole
        self.attention = attention
        self.ops = ops
        self._adapters = adapters
        self._taps: Sequence[int] = ()
        self.use(model)

    def use(self, model: Decoder) -> None:
        """Computes with another model of the same shape from now on. No step may run meanwhile."""
        self._model = model
        adapters = None if self._adapters is None else self._adapters.by_layer
        self.stack = model.fuse(self._layer_pools, self.attention, adapters) if self._is_whole else None

    @property
    def compiles(self) -> bool:
        """Returns whether some steps use kernels that are compiled at their first use."""
        return getattr(self.attention, "fallback", self.attention).name == "triton"

    def tap(self, num_layers: Sequence[int]) -> None:
        """Returns from now on each token's hidden states after these numbers of layers: after all of them, those behind
        the final norm. Call it before graphs are captured."""
        self._taps = num_layers

    @property
    def taps_last(self) -> bool:
        """Returns whether hidden states after the last layer are wanted."""
        return len(self._layer_pools) in self._taps

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Returns the embedding of tokens, [T, D]; all ranks must call it."""
        return self._model.embed(token_ids_T)

    def project(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """See `Decoder.project`."""
        return self._model.project(hidden_RD)

    def forward(
        self,
        batch: Batch,
        on_layer: Callable[[int], None] | None = None,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Returns the logits of `run`."""
        return self.run(batch, on_layer, on_start=on_start).logits_RV

    @torch.inference_mode()
    def run(
        self,
        batch: Batch,
        on_layer: Callable[[int], None] | None = None,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> ForwardOutput:
        """Returns logits [R, V] of the sampled rows, and hidden states if layers are tapped; the batch's K/V are in the
        pages afterwards. Blocks on a CPU.

        `on_layer`: see `Engine.step`; `on_start`: see `engine.step.batch.Forward`.
        """
        adapters = None
        if batch.adapter_T is not None:
            assert self._adapters is not None
            adapters = self._adapters.step(batch.adapter_T, self.ops)
        torch.get_num_threads()  # initializes a new thread's core count before parallel work
        taps = self._model.make_taps(self._taps, len(batch.token_ids_T)) if self._taps and batch.taps else None
        logits_RV = self._model.forward(
            batch.token_ids_T,
            batch.positions_T,
            batch.logit_rows_R,
            batch.meta,
            self._layer_pools,
            self.attention,
            self.ops,
            on_layer,
            self.stack,
            adapters,
            on_start,
            taps,
            batch.all_rows,
        )
        return ForwardOutput(logits_RV, None if taps is None else taps.states_TX)
