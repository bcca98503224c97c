"""Estimates what `decode.draft_model` takes next to its target: weights, and as many pages. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from engine.cache.kv_layout import DTYPE_BYTES, KVLayout
from engine.memory import estimates
from engine.memory.device_memory import DeviceMemory
from engine.models.config import ModelConfig
from engine.models.heads.head_config import HeadConfig, check_no_head, is_head
from engine.models.heads.mtp_config import MTP, MtpConfig
from engine.weights.checkpoint import has_weight_files, list_weight_files, read_headers
from engine.weights.quantized_layouts import find_layouts
from penstock.config import EngineConfig


def draft_bytes(
    folder: str, config: EngineConfig, target: ModelConfig, layout: KVLayout, device: DeviceMemory, num_pages: int
) -> int:
    """Returns the size of a draft model, or of a head over the target's hidden states, with its pages.

    Raises CheckpointError or ConfigError for one that cannot draft for the target.
    """
    max_context = estimates.select_context(config, target)
    if folder == MTP:
        layer = MtpConfig.of(target, config.model)
        weights = _mtp_bytes(layer, config, target, layout.dtype, device)
        return weights + num_pages * layer.page_bytes(layout.page_size, layout.dtype)
    if is_head(folder):
        head = HeadConfig.from_folder(folder, target, config.model)
        weights = head.weight_bytes(layout.dtype, max_context)
        if config.tensor_parallel > 1 and not head.has_embedding:  # rank 0 reads a whole copy of the target's
            weights += estimates.embedding_bytes(target, layout.dtype)
        return weights + num_pages * head.page_bytes(layout.page_size, layout.dtype)
    check_no_head(folder)
    draft = ModelConfig.from_folder(folder)
    own = estimates.make_layout(EngineConfig(model=folder, dtype=config.dtype, page_size=config.page_size), draft)
    weights = estimates.weight_bytes(draft, own.dtype, device.type, draft.context_length)
    return weights + num_pages * own.page_bytes


def _mtp_bytes(config: MtpConfig, engine: EngineConfig, target: ModelConfig, dtype: str, device: DeviceMemory) -> int:
    """Returns the size of a loaded MTP layer: what it adds to the target's layers, and its own tensors and tables."""
    max_context = estimates.select_context(engine, target)
    stored = _quantized_paths(config, engine.model)

    def size(model: ModelConfig) -> int:
        plain = estimates.weight_bytes(model, dtype, device.type, max_context)
        return plain - estimates.saved_bytes(model, "none", stored, dtype, device)

    own = sum(math.prod(shape) for shape in config.own_shapes().values()) * DTYPE_BYTES[dtype]
    tables = max_context * target.rope_dim * 4
    ends = 2 * estimates.embedding_bytes(target, dtype) if engine.tensor_parallel > 1 else 0  # rank 0 reads copies
    return size(config.layer) - size(target) + own + tables + ends


def _quantized_paths(config: MtpConfig, folder: str) -> Collection[str]:
    """Returns the layer's weights that the checkpoint stores quantized; none if it has no weights here."""
    if config.layer.scheme is None or not has_weight_files(Path(folder)):
        return ()
    return set(find_layouts(config.layer.scheme, read_headers(list_weight_files(Path(folder))), config.shapes()))
