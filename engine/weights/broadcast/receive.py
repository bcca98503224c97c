"""Receives a broadcast of weights as one member of its group.

Each member answers twice: whether the manifest fits its model, before any tensor is sent, and whether all tensors have
arrived with their digests. One refusal ends the broadcast for all members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from engine.models.config import ModelConfig
from engine.models.shapes import optional_tensors, tensor_shapes
from engine.weights.broadcast.staged import NewFolder, StagedWeights
from engine.weights.checkpoint import StoredTensor, check_stored, model_name
from penstock.client.broadcast.group import BroadcastGroup
from penstock.client.broadcast.manifest import (
    BroadcastMember,
    TensorEntry,
    WeightsBroadcast,
    WeightsManifest,
    digest_of_bytes,
)
from penstock.errors import CheckpointError, InvalidInput, Unavailable

_ORIGIN = Path("the broadcast")  # where errors say that a tensor is stored


def receive_weights(model: ModelConfig, broadcast: WeightsBroadcast, member: BroadcastMember) -> StagedWeights:
    """Returns the weights in memory, once every member has them and the folder is written. Blocks.

    Raises InvalidInput or CheckpointError for weights that do not fit the model, and Unavailable if the group breaks.
    Nothing is left then.
    """
    with BroadcastGroup(broadcast, member.rank, member.num_ranks) as group:
        receiving = _Receiving(group, model, broadcast, member)
        try:
            return receiving.run()
        except BaseException:
            receiving.discard()
            raise


class _Receiving:
    def __init__(
        self, group: BroadcastGroup, model: ModelConfig, broadcast: WeightsBroadcast, member: BroadcastMember
    ) -> None:
        self._group, self._model, self._broadcast, self._member = group, model, broadcast, member
        self._staged: StagedWeights | None = None
        self._folder: NewFolder | None = None

    def run(self) -> StagedWeights:
        encoded = torch.empty(self._broadcast.manifest_bytes, dtype=torch.uint8)
        self._group.broadcast(encoded)
        with self._agreed():
            manifest, staged = self._prepare(_view(encoded).tobytes())
        digests = self._receive(manifest, staged.data)
        with self._agreed(is_patient=True):
            self._finish(manifest, staged, digests)
        if self._folder is not None:
            self._folder.publish()
        return staged

    def discard(self) -> None:
        if self._staged is not None:
            self._staged.close()
        if self._folder is not None:
            self._folder.discard()

    @contextlib.contextmanager
    def _agreed(self, *, is_patient: bool = False) -> Iterator[None]:
        """Raises at every member if the block fails at one of them."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Unavailable):  # the member's own error says more
                self._group.all_agree(False, is_patient=is_patient)
            raise
        if not self._group.all_agree(True, is_patient=is_patient):
            raise Unavailable("another worker cannot use the broadcast")

    def _prepare(self, encoded: bytes) -> tuple[WeightsManifest, StagedWeights]:
        """Checks that the manifest fits the model, and makes room for the tensors."""
        if digest_of_bytes(encoded) != self._broadcast.manifest_digest:
            raise InvalidInput("manifest", "is not the one that the update names; broadcast the weights again")
        manifest = WeightsManifest.parse(encoded)
        check_manifest(manifest, self._model)
        self._staged = StagedWeights(manifest)
        if self._member.save_to:
            self._folder = NewFolder(Path(self._member.save_to), manifest.num_bytes, self._broadcast.key)
        return manifest, self._staged

    def _receive(self, manifest: WeightsManifest, data: torch.Tensor) -> list[Future[str]]:
        """Receives every tensor; returns their digests, which are computed while the next ones arrive."""
        offset, digests = 0, []
        with ThreadPoolExecutor(1, "weights digest") as hashing:
            for entry in manifest.tensors:
                part = data[offset : offset + entry.num_bytes]
                self._group.broadcast(part)
                digests.append(hashing.submit(digest_of_bytes, _view(part)))
                offset += entry.num_bytes
        return digests

    def _finish(self, manifest: WeightsManifest, staged: StagedWeights, digests: list[Future[str]]) -> None:
        """Compares the tensors with the manifest, and writes the folder if that is this member's part."""
        for entry, digest in zip(manifest.tensors, digests, strict=True):
            if digest.result() != entry.digest:
                raise CheckpointError(f"{entry.name} arrived with other bytes than were sent; broadcast again")
        if self._folder is not None:
            self._folder.write(staged)


def check_manifest(manifest: WeightsManifest, model: ModelConfig) -> None:
    """Raises CheckpointError unless the tensors are those that a checkpoint of the model must store."""
    stored = {model_name(each.name): _stored(each) for each in manifest.tensors}
    check_stored(_ORIGIN, stored, tensor_shapes(model), optional_tensors(model), model.scheme)


def _stored(entry: TensorEntry) -> StoredTensor:
    return StoredTensor(_ORIGIN, entry.name, entry.dtype, entry.shape, entry.num_bytes, 0)


def _view(data: torch.Tensor) -> memoryview:
    return data.numpy().data
