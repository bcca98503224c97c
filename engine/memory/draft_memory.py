"""Estimates what `decode.draft_model` takes next to its target: weights, and as many pages. Torch-free."""

from __future__ import annotations

from engine.cache.kv_layout import KVLayout
from engine.memory import estimates
from engine.memory.device_memory import DeviceType
from engine.models.config import ModelConfig
from engine.models.heads.head_config import HeadConfig, check_no_head, is_head
from penstock.config import EngineConfig


def draft_bytes(
    folder: str, config: EngineConfig, target: ModelConfig, layout: KVLayout, device: DeviceType, num_pages: int
) -> int:
    """Returns the size of a draft model, or of a head over the target's hidden states, with its pages.

    Raises CheckpointError or ConfigError for one that cannot draft for the target.
    """
    max_context = estimates.select_context(config, target)
    if is_head(folder):
        head = HeadConfig.from_folder(folder, target, config.model)
        weights = head.weight_bytes(layout.dtype, max_context)
        if config.tensor_parallel > 1 and not head.has_embedding:  # rank 0 reads a whole copy of the target's
            weights += estimates.embedding_bytes(target, layout.dtype)
        return weights + num_pages * head.page_bytes(layout.page_size, layout.dtype)
    check_no_head(folder)
    draft = ModelConfig.from_folder(folder)
    own = estimates.make_layout(EngineConfig(model=folder, dtype=config.dtype, page_size=config.page_size), draft)
    weights = estimates.weight_bytes(draft, own.dtype, device, draft.context_length)
    return weights + num_pages * own.page_bytes
