"""Updates a rank's weights: checks the new ones while the old ones serve, then switches to them between two steps.

On a CPU the new model is built beside the old one, shared with the other replicas of the host, and replaces it. A GPU
has no room for two models, and its graphs hold addresses: there the files are checked first, and the tensors are
overwritten in place, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.memory.device_memory import available_bytes
from engine.memory.estimates import make_layout
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import check_share, check_update, open_weights
from engine.parallel.model_part import ModelPart, load_decoder, quantization_of
from engine.parallel.shard import shard_layout
from engine.weights.checkpoint import CONFIG_FILE, list_weight_files
from penstock.config import EngineConfig, LoadedWeightsConfig
from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class NextWeights:
    """Weights that are checked but not in use yet."""

    config: EngineConfig
    source: LoadedWeightsConfig
    folder: Path  # to read them from
    decoder: Decoder | None  # None: they are read when they are applied


def prepare_weights(part: ModelPart, weights: LoadedWeightsConfig, staged: Path | None = None) -> NextWeights:
    """Checks names, shapes and types of all tensors, and on a CPU reads them. Blocks; changes nothing of `part`.

    `staged` is a folder in memory with the same files as the update's, which are read from there. Raises
    CheckpointError if the weights do not fit the model, or the update's folder does not hold them.
    """
    config = part.config.model_copy(update={"weights": weights})
    folder = staged or Path(weights.path)
    check_config(Path(weights.path), part.model)
    check_share(folder, part.model, part.group.shard, part.layout.dtype, quantization_of(config))
    check_update(weights)
    decoder = None
    if part.device.type == "cpu":
        _check_memory(folder)
        decoder = load_decoder(config, part.model, part.layout, part.device, part.group, staged=staged)
    return NextWeights(config, weights, folder, decoder)


def _check_memory(folder: Path) -> None:
    """Raises CheckpointError if the files do not fit beside the weights in force."""
    needed, free = sum(file.stat().st_size for file in list_weight_files(folder)), available_bytes()
    if needed > free:
        raise CheckpointError(
            f"{folder} has {needed >> 20} MiB, to fit beside the weights in force, and {free >> 20} MiB are free; "
            "give the machine more, or replace the workers with `penstock upgrade`"
        )


# The served model's own stay in force.
_NOT_OF_WEIGHTS = {"revision", "generation_defaults", "eos_token_ids", "dtype", "has_image_parts"}


def check_config(folder: Path, model: ModelConfig) -> None:
    """Raises CheckpointError if the folder has a config.json of a model that computes otherwise."""
    if not (folder / CONFIG_FILE).exists():
        return
    other = ModelConfig.from_folder(folder, has_weights=False)
    for name in (field.name for field in fields(model) if field.name not in _NOT_OF_WEIGHTS):
        if (found := getattr(other, name)) != (wanted := getattr(model, name)):
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: {name} is {found!r}, and {wanted!r} in the served model; give weights of the "
                "same model, or replace the model with `penstock upgrade`"
            )


def apply_weights(part: ModelPart, weights: NextWeights) -> ModelPart:
    """Returns the part with the new weights. Blocks; no step may run meanwhile.

    Raises CheckpointError if the files were changed since they were checked. After any error the part is unusable.
    """
    config, model = weights.config, part.model
    decoder = weights.decoder
    if decoder is None:
        decoder, dtype = part.decoder, getattr(torch, part.layout.dtype)
        check_update(weights.source)
        with open_weights(weights.folder, model, dtype, part.device, part.group, quantization_of(config)) as reader:
            decoder.reload(reader)
    layout = shard_layout(make_layout(config, model), part.group.shard)
    return replace(part, config=config, decoder=decoder, layout=layout)


class PartOwner(Protocol):
    """Holds a rank's part. Implemented by `engine.parallel.worker_rank.WorkerRank`."""

    part: ModelPart

    def use_part(self, part: ModelPart) -> None: ...


def weight_handlers(owner: PartOwner) -> Mapping[str, Callable[[Any], Any]]:
    """Returns the handlers by which another rank updates its weights, by kind of message."""
    held: list[NextWeights] = []

    def prepare(body: dict[str, Any]) -> None:
        held.clear()
        weights, staged = LoadedWeightsConfig.model_validate(body["weights"]), body["staged"]
        held.append(prepare_weights(owner.part, weights, Path(staged) if staged else None))

    def apply(body: None) -> None:
        owner.use_part(apply_weights(owner.part, held.pop()))

    return {"prepare_weights": prepare, "apply_weights": apply}
