"""Builds a model, or one rank's part of it, from a checkpoint folder. Called once while a worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from engine.layers.linear import can_multiply
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.shapes import optional_tensors, tensor_shapes
from engine.models.sharding import tensor_slices
from engine.parallel.collectives import SINGLE_RANK, ParallelGroup
from engine.parallel.shard import Shard
from engine.weights.checkpoint import (
    CONFIG_FILE,
    check_tensors,
    checkpoint_revision,
    checkpoint_writes,
    weights_digest,
)
from engine.weights.quantized_weight import Kind
from engine.weights.reader import WeightReader
from engine.weights.shared_weights import load_shared
from engine.weights.tensor_slices import check_slice_groups
from penstock.config import LoadedWeightsConfig
from penstock.errors import CheckpointError

log = logging.getLogger(__name__)


def check_share(folder: Path, config: ModelConfig, shard: Shard, dtype: str, quantization: Kind | None) -> None:
    """Checks that a rank's share of the checkpoint can be loaded, from the headers of its files.

    Every rank does so before it joins the others, because one that fails later breaks their connections, and they would
    report a lost rank. Raises CheckpointError or ConfigError.
    """
    shapes = tensor_shapes(config)
    _, stored = check_tensors(folder, shapes, optional_tensors(config), config.scheme)
    slices = tensor_slices(config, shard)
    check_slice_groups(slices, shapes, config.scheme, stored, quantization, dtype)


def check_update(weights: LoadedWeightsConfig) -> None:
    """Raises CheckpointError unless the folder holds the weights of this update."""
    found = weights_digest(Path(weights.path))
    if found != weights.digest:
        raise CheckpointError(
            f"{weights.path} holds weights of digest {found}, and version {weights.version} has {weights.digest}; "
            "update the weights again"
        )


def open_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: ParallelGroup,
    quantization: Kind | None,
    on_progress: Callable[[float], None] = lambda _: None,
) -> WeightReader:
    """Returns a reader of this rank's share of the folder's tensors. Raises CheckpointError if they do not fit."""
    return WeightReader(
        folder,
        tensor_shapes(config),
        dtype=dtype,
        device=device,
        can_multiply=can_multiply,
        optional=optional_tensors(config),
        slices=tensor_slices(config, group.shard),
        scheme=config.scheme,
        quantization=quantization,
        on_progress=on_progress,
    )


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    weights: LoadedWeightsConfig | None = None,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    on_progress: Callable[[float], None],
    group: ParallelGroup = SINGLE_RANK,
    share: bool = False,
    quantization: Kind | None = None,
    staged: Path | None = None,
) -> Decoder:
    """Builds the model and reads its weights, or those of an update from the update's folder. Blocks. With `share`, all
    replicas on CPUs of this host use one copy. `staged` is a folder in memory with the same files as the update's.

    Raises CheckpointError if the weights do not fit the configuration, or are not those of the update.
    """
    source = folder if weights is None else Path(weights.path)
    if weights is not None:
        check_update(weights)

    def build(on: torch.device) -> Decoder:
        with open_weights(staged or source, config, dtype, on, group, quantization, on_progress) as reader:
            return Decoder(config, reader, max_context, on, group)

    if not share or device.type != "cpu":
        return build(device)
    version = "" if weights is None else f"{weights.version} {weights.digest}"
    files = f"{checkpoint_revision(folder)} {checkpoint_writes(source)} {version}"
    key = f"{files} {quantization} {dtype} {max_context} {group.shard} {torch.get_num_threads()}"
    made, is_shared = load_shared(key, folder / CONFIG_FILE, lambda: build(device), lambda: build(torch.device("meta")))
    assert isinstance(made, Decoder)
    if is_shared:
        log.info("the weights of %s are shared with a replica on this host: nothing was read", folder)
    return made
