"""From a family's name to the class that computes it. The one place to enter a new architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from engine.checkpoint import CONFIG_FILE, checkpoint_revision, checkpoint_writes
from engine.layers.quantized import Kind
from engine.model_config import ModelConfig
from engine.models.cuts import tensor_cuts
from engine.models.decoder import Decoder
from engine.models.shapes import optional_tensors, tensor_shapes
from engine.parallel import ALONE, ParallelGroup
from engine.shared_weights import load_shared
from engine.weights import WeightReader

log = logging.getLogger(__name__)

_MODELS = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), Decoder
)


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    on_progress: Callable[[float], None],
    group: ParallelGroup = ALONE,
    share: bool = False,
    quantization: Kind | None = None,
) -> Decoder:
    """Builds the model, or a rank's part of it, and reads its weights; blocks. With `share` all replicas on CPUs of
    this host have one copy of them.

    Raises CheckpointError where they do not fit the configuration.
    """
    model = _MODELS[config.family.model_type]
    expected, optional = tensor_shapes(config), optional_tensors(config)
    cuts = tensor_cuts(config, group.shard)

    def build(on: torch.device) -> Decoder:
        with WeightReader(
            folder,
            expected,
            dtype=dtype,
            device=on,
            optional=optional,
            cuts=cuts,
            scheme=config.scheme,
            quantization=quantization,
            on_progress=on_progress,
        ) as reader:
            return model(config, reader, max_context, on, group)

    if not share or device.type != "cpu":
        return build(device)
    files = f"{checkpoint_revision(folder)} {checkpoint_writes(folder)}"
    key = f"{files} {quantization} {dtype} {max_context} {group.shard} {torch.get_num_threads()}"
    made, was_there = load_shared(key, folder / CONFIG_FILE, lambda: build(device), lambda: build(torch.device("meta")))
    assert isinstance(made, Decoder)
    if was_there:
        log.info("the weights of %s are those of a replica on this host: nothing was read", folder)
    return made
