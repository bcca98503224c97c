"""Prepares what attention layers read besides the tokens themselves: rotations, pages, and the scales of Llama 4.

`engine.models.decoder` asks once per step; all layers of one kind share the result. It owns the rotary tables.

Shapes: `T` tokens, `C` positions, `H` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.kernels.attention_interface import AttentionMetadata, QkNorms
from engine.layers.attention_chunks import split_at_chunks
from engine.layers.rope import build_rope_table
from engine.models.config import ModelConfig
from engine.models.irope_config import IRopeConfig, QueryTemperature


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    cos_sin_T2H: torch.Tensor
    meta: AttentionMetadata
    head_norms: QkNorms | None = None  # of queries and keys, in families without weights for them
    query_scale_T11: torch.Tensor | None = None  # float32


class LayerInputs:
    """The inputs of every layer in a step."""

    def __init__(self, config: ModelConfig, max_context: int, device: torch.device) -> None:
        self.rope_C2H = build_rope_table(config.rope, config.rope_dim, max_context).to(device)
        self.local_rope_C2H: torch.Tensor | None = None
        if config.local_rope is not None:
            self.local_rope_C2H = build_rope_table(config.local_rope, config.rope_dim, max_context).to(device)
        self._has_window = [window is not None for window in config.windows]
        self._irope, self._eps, self._head_dim = config.irope, config.rms_norm_eps, config.head_dim

    @property
    def is_uniform(self) -> bool:
        """Returns whether all layers rotate alike and see the same pages."""
        return self.local_rope_C2H is None and self._irope is None

    def prepare(
        self, positions_T: torch.Tensor, meta: AttentionMetadata, page_size: int, dtype: torch.dtype
    ) -> list[AttentionInputs]:
        """Returns the inputs by layer. Does not wait for the device."""
        every = local = AttentionInputs(self.rope_C2H[positions_T], meta)
        if self._irope is not None:
            return self._interleaved(self._irope, every, positions_T, page_size, dtype)
        if self.local_rope_C2H is not None:
            local = AttentionInputs(self.local_rope_C2H[positions_T], meta)
        if meta.windowed is not None:
            local = replace(local, meta=meta.windowed)
        return [local if has_window else every for has_window in self._has_window]

    def _interleaved(
        self,
        irope: IRopeConfig,
        every: AttentionInputs,
        positions_T: torch.Tensor,
        page_size: int,
        dtype: torch.dtype,
    ) -> list[AttentionInputs]:
        norms, scale_T11 = None, None
        if irope.has_head_norms:
            ones_H = torch.ones(self._head_dim, dtype=dtype, device=positions_T.device)
            norms = QkNorms(ones_H, ones_H, self._eps)
        if irope.temperature is not None:
            scale_T11 = _query_scales(irope.temperature, positions_T)[:, None, None]
        turns_T2H = every.cos_sin_T2H
        unturned_T2H = torch.zeros_like(turns_T2H)
        unturned_T2H[:, 0] = 1.0
        metas = {False: every.meta}
        if irope.chunk_tokens is not None:
            is_host = positions_T.device.type == "cpu"
            metas[True] = split_at_chunks(every.meta, irope.chunk_tokens, page_size, drops_empty=is_host)
        kinds = {}
        for is_chunked, meta in metas.items():
            kinds[True, is_chunked] = AttentionInputs(turns_T2H, meta, norms)
            kinds[False, is_chunked] = AttentionInputs(unturned_T2H, meta, None, scale_T11)
        return [kinds[layer in irope.rotated, layer in irope.chunked] for layer in range(len(self._has_window))]


def _query_scales(temperature: QueryTemperature, positions_T: torch.Tensor) -> torch.Tensor:
    steps_T = torch.floor((positions_T.float() + 1.0) / temperature.floor_tokens)
    return torch.log1p(steps_T) * temperature.scale + 1.0
