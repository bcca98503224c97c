"""From a family's name to the class that computes it. The one place to enter a new architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.model_config import ModelConfig
from engine.models.cuts import tensor_cuts
from engine.models.decoder import Decoder
from engine.models.shapes import optional_tensors, tensor_shapes
from engine.parallel import ALONE, ParallelGroup
from engine.weights import WeightReader

_MODELS = dict.fromkeys(("deepseek_v2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), Decoder)


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    on_progress: Callable[[float], None],
    group: ParallelGroup = ALONE,
) -> Decoder:
    """Builds the model, or a rank's part of it, and reads its weights; blocks.

    Raises CheckpointError where they do not fit the configuration.
    """
    model = _MODELS[config.family.model_type]
    expected, optional = tensor_shapes(config), optional_tensors(config)
    cuts = tensor_cuts(config, group.shard)
    with WeightReader(
        folder, expected, dtype=dtype, device=device, optional=optional, cuts=cuts, on_progress=on_progress
    ) as reader:
        return model(config, reader, max_context, device, group)
