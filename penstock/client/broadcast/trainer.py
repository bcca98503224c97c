"""Sends a trainer's weights to all workers of a deployment, which put them in force. Needs torch.

One process calls it: in a trainer of several ranks the one that has gathered the tensors.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import grpc
import torch

from penstock.client.auth import ClientTls, auth_metadata
from penstock.client.broadcast.group import TRAINER, BroadcastGroup, TrainerStore, local_address
from penstock.client.broadcast.manifest import (
    ITEM_BYTES,
    TIMEOUT_S,
    WITHIN_S,
    TensorEntry,
    WeightsBroadcast,
    WeightsManifest,
    digest_of_bytes,
)
from penstock.errors import CheckpointError, InvalidInput, Unavailable
from penstock.rpc.admin_token import find_token
from penstock.rpc.failed_call import failed_call
from penstock.rpc.secret import ADMIN, ClusterSecrets
from penstock.types import PauseMode
from penstock.v1 import admin_pb2, admin_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
# Notices a controller's host that no longer answers.
_CHANNEL_OPTIONS = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000))
_PAUSE_MARGIN_S = 600.0  # for preparing and pausing, beside the broadcast and the requests that end first


def broadcast_weights(
    tensors: Mapping[str, torch.Tensor],
    folder: str | Path,
    admin: str = "localhost:50052",
    *,
    mode: PauseMode | str = PauseMode.WAIT,
    version: int = 0,
    pause_timeout_s: float = 60.0,
    host: str = "",
    timeout_s: float = TIMEOUT_S,
    within_s: float = WITHIN_S,
    secret_file: str = "",
    tls: ClientTls | None = None,
) -> int:
    """Replaces the weights of every worker by `tensors`, and returns the number of the update. Blocks until it is over.

    `tensors` have the names and shapes of the served model's checkpoint. They are also written to `folder`, from which
    workers that start later load them: it must not exist, and be on storage that all machines see at this path. `mode`,
    `version` and `pause_timeout_s` are those of `penstock weights update`. `host` is this machine's address for the
    workers, by default the one from which it reaches `admin`. Any member waits `timeout_s` for another; the broadcast
    takes at most `within_s`. `secret_file` holds the deployment's secret; without it, the token that a deployment on
    this machine has left for its account is used.

    Raises InvalidInput for tensors that cannot be sent, CheckpointError if the deployment keeps its old weights, and
    Unavailable if the controller cannot be reached or is lost; the update may then still be put in force, if all
    workers had received it.
    """
    manifest = make_manifest(tensors)
    encoded = manifest.encode()
    store = _listen(host, admin, timeout_s)
    broadcast = WeightsBroadcast(
        store.address, secrets.token_hex(16), len(encoded), digest_of_bytes(encoded), timeout_s, within_s
    )
    broadcast.check()

    def send(num_workers: int) -> None:
        with BroadcastGroup(broadcast, TRAINER, num_workers + 1, store.store) as group:
            send_weights(group, tensors, manifest)

    request = admin_pb2.UpdateWeightsRequest(
        path=str(folder),
        mode=str(mode),
        version=version,
        timeout_s=pause_timeout_s,
        broadcast=worker_pb2.WeightsBroadcast(**asdict(broadcast)),
    )
    limit_s, metadata = within_s + pause_timeout_s + _PAUSE_MARGIN_S, _metadata(admin, secret_file)
    with _open_channel(admin, tls) as channel:
        call = admin_pb2_grpc.AdminStub(channel).UpdateWeights(request, timeout=limit_s, metadata=metadata)
        try:
            progress = _follow(call, send)
        except grpc.RpcError as error:
            raise failed_call(error, admin, "give the deployment's admin address, by default port 50052") from error
    if progress.stage != "done":
        raise CheckpointError(f"the old weights stay in force: {progress.detail}")
    return int(progress.version)


def make_manifest(tensors: Mapping[str, torch.Tensor]) -> WeightsManifest:
    """Lists the tensors with their digests, large elements first, as safetensors aligns them. Raises InvalidInput."""
    entries = []
    for name, tensor in tensors.items():
        if tensor.is_meta or hasattr(tensor, "full_tensor"):
            raise InvalidInput("tensors", f"{name} is only a part or a description; gather it (full_tensor) first")
        if tensor.dtype not in _DTYPES:
            raise InvalidInput("tensors", f"{name} is {tensor.dtype}; give {', '.join(map(str, _DTYPES))}")
        digest = digest_of_bytes(_bytes_of(tensor).numpy().data)
        entries.append(TensorEntry(name, _DTYPES[tensor.dtype], tuple(tensor.shape), digest))
    entries.sort(key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))
    return WeightsManifest(tuple(entries))


def _listen(host: str, admin: str, timeout_s: float) -> TrainerStore:
    """Returns the store, at the address from which this machine reaches `admin` unless `host` names one."""
    try:
        host = host or local_address(admin)
    except OSError as error:
        raise InvalidInput(
            "admin", f"is {admin!r}: {error}; give host:port of the deployment's Admin service"
        ) from error
    try:
        return TrainerStore(host, timeout_s)
    except OSError as error:
        raise InvalidInput("host", f"is {host!r}: {error}; give an IPv4 address of this machine") from error


def _follow(call: Iterable[admin_pb2.WeightsProgress], send: Callable[[int], None]) -> admin_pb2.WeightsProgress:
    """Calls `send` with the number of workers once they join, and returns the last progress of the update."""
    progress, is_sent = admin_pb2.WeightsProgress(), False
    for message in call:
        progress = message
        if progress.stage == "receiving" and progress.num_workers and not is_sent:
            is_sent = True
            try:
                send(progress.num_workers)
            except Unavailable as error:
                log.warning("%s", error.message)  # the workers' own reasons follow, and say more
    return progress


def send_weights(group: BroadcastGroup, tensors: Mapping[str, torch.Tensor], manifest: WeightsManifest) -> None:
    """Sends the manifest and, if all workers agree, the tensors. Raises Unavailable."""
    group.broadcast(torch.frombuffer(bytearray(manifest.encode()), dtype=torch.uint8))
    if not group.all_agree(True):
        raise Unavailable("a worker refuses the weights")
    for entry in manifest.tensors:
        group.broadcast(_bytes_of(tensors[entry.name]))
    if not group.all_agree(True, is_patient=True):
        raise Unavailable("a worker could not use or write the weights that it has received")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes in host memory; they are its own if it is contiguous there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _metadata(admin: str, secret_file: str) -> tuple[tuple[str, str], ...]:
    if secret_file:
        return auth_metadata(ClusterSecrets.read(secret_file, "secret_file").current.token(ADMIN))
    return auth_metadata(find_token(admin))


def _open_channel(admin: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(admin, _CHANNEL_OPTIONS)
    return grpc.secure_channel(admin, tls.credentials(), [*_CHANNEL_OPTIONS, *tls.options()])
