"""Loads a head next to its target, and runs it over KV pages of its own. Only rank 0 does, with the whole head."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from engine.cache.pool_memory import allocate_pool
from engine.engine import Engine
from engine.kernels.attention_interface import KvLayer
from engine.layers.linear import Linear, can_multiply
from engine.models.config import ModelConfig
from engine.models.heads.eagle3 import Eagle3Head
from engine.models.heads.head import Embed, Head, Project
from engine.models.heads.head_config import HEAD_EMBEDDING, HEAD_MAP, HeadConfig
from engine.models.heads.mtp import MtpHead
from engine.models.heads.mtp_config import MtpConfig
from engine.models.shapes import EMBEDDING, HEAD, Shapes
from engine.step.batch import Batch
from engine.weights.checkpoint import check_tensors, list_weight_files, read_headers
from engine.weights.reader import WeightReader
from penstock.errors import CheckpointError

log = logging.getLogger(__name__)

_UNREAD = frozenset({HEAD_EMBEDDING, HEAD_MAP, "t2d"})


class HeadRunner:
    """A head bound to its KV pages, which have one layer, and to its target, whose hidden states it taps."""

    def __init__(self, head: Head, config: HeadConfig | MtpConfig, engine: Engine, num_pages: int) -> None:
        layer, layout = config.layer, engine.layout
        self.page_size, self.num_pages = layout.page_size, num_pages
        self.device = device = engine.kv_pages.device
        shape = (num_pages, 2, layer.num_kv_heads, layout.page_size, layer.head_dim)
        self._kv = KvLayer(allocate_pool(shape, getattr(torch, layout.dtype), device))
        self._head, self._target = head, engine.runner
        self._target.tap(config.taps)

    @torch.inference_mode()
    def combine(self, states_TX: torch.Tensor) -> torch.Tensor:
        return self._head.combine(states_TX)

    @torch.inference_mode()
    def run(self, batch: Batch, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [R, V] of the sampled rows and their hidden states [R, D]. A row's position is that of its
        hidden state, its context the number of stored entries up to it."""
        return self._head.forward(
            batch.token_ids_T,
            hidden_TD,
            batch.positions_T,
            batch.logit_rows_R,
            batch.meta,
            self._kv,
            self._target.attention,
            self._target.ops,
        )

    def close(self) -> None:
        """Ends the taps."""
        self._target.tap(())


def load_head(folder: str, engine: Engine, target_folder: str, num_pages: int) -> HeadRunner:
    """Loads the head for an engine's model from a checkpoint folder. Blocks.

    Raises CheckpointError for a head that cannot be served, ConfigError for one of another model.
    """
    config = HeadConfig.from_folder(folder, engine.model, target_folder)
    device, dtype = engine.kv_pages.device, getattr(torch, engine.layout.dtype)
    target_ids_W = _read_map(Path(folder), config).to(device) if config.has_map else None
    embed: Embed | None = None
    if not config.has_embedding:
        embed = engine.runner.embed if engine.num_ranks == 1 else _read_embedding(engine)
    with WeightReader(
        Path(folder),
        config.shapes(),
        dtype=dtype,
        device=device,
        can_multiply=can_multiply,
        optional=_UNREAD,
        scheme=config.layer.scheme,
    ) as reader:
        head = Eagle3Head(config, reader, engine.max_context, device, target_ids_W, embed)
    return HeadRunner(head, config, engine, num_pages)


def load_mtp(engine: Engine, target_folder: str, num_pages: int) -> HeadRunner:
    """Loads the layer of an engine's model that predicts further tokens: that of the weights in force, or the model's
    own if an update has none. Blocks.

    Raises ConfigError for a model without one, CheckpointError if the checkpoint does not hold its tensors.
    """
    config = MtpConfig.of(engine.model, target_folder)
    embed: Embed = engine.runner.embed
    project: Project = engine.runner.project
    if engine.num_ranks > 1:
        embed = _read_embedding(engine)
        project = Linear(_read_copy(engine, EMBEDDING if config.layer.tie_embeddings else HEAD))
    folder = Path(engine.weights_folder)
    if not _has_layer(config, folder):
        folder = Path(target_folder)
        if engine.weights_version:
            log.warning("weights %d have no MTP layer, so that of %s drafts", engine.weights_version, folder)
    with _open(engine, folder, config.shapes()) as reader:
        head = MtpHead(config, reader, engine.max_context, engine.kv_pages.device, embed, project)
    return HeadRunner(head, config, engine, num_pages)


def check_mtp_update(model: ModelConfig, folder: Path) -> None:
    """Raises CheckpointError if new weights of a model hold only a part of its MTP layer, or other shapes."""
    config = MtpConfig.of(model, str(folder))
    if _has_layer(config, folder):
        shapes = config.shapes()
        check_tensors(folder, shapes, _others(folder, shapes), model.scheme)


def _has_layer(config: MtpConfig, folder: Path) -> bool:
    return any(name.startswith(config.prefix) for name in read_headers(list_weight_files(folder)))


def _others(folder: Path, shapes: Shapes) -> frozenset[str]:
    """Returns the stored tensors that do not belong to those of `shapes`."""
    prefixes = tuple({f"{name.removesuffix('.weight')}." for name in shapes})
    return frozenset(name for name in read_headers(list_weight_files(folder)) if not name.startswith(prefixes))


def _open(engine: Engine, folder: Path, shapes: Shapes) -> WeightReader:
    """Returns a reader of a few of a target's tensors."""
    return WeightReader(
        folder,
        shapes,
        dtype=getattr(torch, engine.layout.dtype),
        device=engine.kv_pages.device,
        can_multiply=can_multiply,
        optional=_others(folder, shapes),
        scheme=engine.model.scheme,
    )


def _read_copy(engine: Engine, name: str) -> torch.Tensor:
    """Returns the target's whole embedding or output head, of which each rank holds only a part."""
    shapes: Shapes = {name: (engine.model.vocab_size, engine.model.hidden_size)}
    with _open(engine, Path(engine.weights_folder), shapes) as reader:
        return reader.read(name)


def _read_embedding(engine: Engine) -> Embed:
    embedding_VD = _read_copy(engine, EMBEDDING)
    return lambda token_ids_T: F.embedding(token_ids_T, embedding_VD)


def _read_map(folder: Path, config: HeadConfig) -> torch.Tensor:
    """Returns the target's token for each token of the head, int64. Raises CheckpointError unless they differ and are
    in the target's vocabulary."""
    stored = read_headers(list_weight_files(folder))[HEAD_MAP]
    if stored.shape != (config.vocab_size,) or stored.dtype != "I64":
        raise CheckpointError(
            f"{stored.file}: tensor {HEAD_MAP} is {stored.dtype} {list(stored.shape)}, and config.json asks for I64 "
            f"[{config.vocab_size}]; both must be of one checkpoint"
        )
    with safe_open(stored.file, framework="pt") as file:
        ids = file.get_tensor(HEAD_MAP) + torch.arange(config.vocab_size)
    if len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size:
        raise CheckpointError(
            f"{stored.file}: {HEAD_MAP} must lead to different tokens below {config.layer.vocab_size}; fetch the "
            "checkpoint again"
        )
    return ids
