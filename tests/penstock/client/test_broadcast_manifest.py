"""Tests what a worker accepts as the manifest of a broadcast, and what a trainer can send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.client.broadcast import manifest as limits
from penstock.client.broadcast.manifest import WeightsBroadcast, WeightsManifest
from penstock.client.broadcast.trainer import broadcast_weights, make_manifest
from penstock.errors import InvalidInput
from penstock.v1 import worker_pb2

DIGEST = "0" * 64
ROW = ["a.weight", "BF16", [2, 3], DIGEST]


def test_a_manifest_survives_its_json_form_and_begins_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).to(torch.bfloat16),
        "c": torch.arange(7, dtype=torch.int8),
        "a": torch.randn(()),
        "transposed": torch.randn(4, 6).T,
    }
    manifest = make_manifest(tensors)
    assert WeightsManifest.parse(manifest.encode()) == manifest
    assert manifest.num_bytes == 30 + 7 + 4 + 96
    file = tmp_path / "w.safetensors"
    data = [
        tensors[each.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in manifest.tensors
    ]
    file.write_bytes(manifest.file_header() + b"".join(data))
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x80\x04K\x01.", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        ({"a": 1}, "has to be a list"),
        ([], "has to be a list"),
        ([ROW, ROW], "names a tensor twice"),
        ([ROW[:3]], r"not \[name, dtype, shape, digest\]"),
        ([["", *ROW[1:]]], "give 1 to 512 characters"),
        ([["x" * 600, *ROW[1:]]], "give 1 to 512 characters"),
        ([["__metadata__", *ROW[1:]]], "has the name '__metadata__'"),
        ([["a", "object", [1], DIGEST]], "a is 'object'; send F64"),
        ([["a", ["BF16"], [1], DIGEST]], "a is "),
        ([["a", "BF16", [0], DIGEST]], "a has no usable shape"),
        ([["a", "BF16", [-1, 4], DIGEST]], "a has no usable shape"),
        ([["a", "BF16", [True], DIGEST]], "a has no usable shape"),
        ([["a", "BF16", [1.0], DIGEST]], "a has no usable shape"),
        ([["a", "BF16", [1] * 9, DIGEST]], "at most 8 sizes"),
        ([["a", "F64", [1 << 30, 1 << 30], DIGEST]], "at most 70368744177664 are accepted"),
        ([["a", "BF16", [1], "zz"]], "a has no SHA-256"),
    ],
)
def test_other_data_is_refused_by_its_fault(data: object, problem: str) -> None:
    encoded = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(InvalidInput, match=f"^manifest: .*{problem}"):
        WeightsManifest.parse(encoded)


def test_the_size_of_a_manifest_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = json.dumps([ROW]).encode()
    monkeypatch.setattr(limits, "MAX_MANIFEST_BYTES", len(encoded) - 1)
    with pytest.raises(InvalidInput, match=r"manifest: has .* bytes; at most"):
        WeightsManifest.parse(encoded)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.empty(2, device="meta"), "tensors: a is only a part or a description; gather it"),
        (torch.zeros(2, dtype=torch.complex64), "tensors: a is torch.complex64; give torch.float64"),
        (torch.zeros(0), "a has no usable shape"),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused(tensor: torch.Tensor, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        make_manifest({"a": tensor}).encode()


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ({"admin": "localhost"}, "admin: is 'localhost': .*; give host:port of the deployment's Admin service"),
        ({"host": "192.0.2.1"}, "host: is '192.0.2.1': .*; give an IPv4 address of this machine"),
    ],
)
def test_a_trainer_with_unusable_addresses_is_refused_before_it_calls(addresses: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        broadcast_weights({"a": torch.ones(1)}, "/steps/1", **addresses)  # type: ignore[arg-type]


VALID = {
    "address": "10.0.0.1:7000",
    "key": "0" * 32,
    "manifest_bytes": 10,
    "manifest_digest": DIGEST,
    "timeout_s": 5.0,
    "within_s": 50.0,
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"address": "10.0.0.1"}, "broadcast.address: is '10.0.0.1'; give host:port"),
        ({"address": "10.0.0.1:0"}, "broadcast.address"),
        ({"key": "../0"}, "broadcast.key"),
        ({"manifest_bytes": 0}, "broadcast.manifest_bytes: is 0"),
        ({"manifest_bytes": (64 << 20) + 1}, "broadcast.manifest_bytes: is 67108865"),
        ({"manifest_digest": "f"}, "broadcast.manifest_digest"),
        ({"timeout_s": -1.0}, "broadcast.timeout_s: is -1.0; give seconds, more than 0"),
        ({"within_s": float("inf")}, "broadcast.within_s: is inf"),
    ],
)
def test_the_call_that_announces_a_broadcast_is_checked(changes: dict[str, object], problem: str) -> None:
    assert WeightsBroadcast.from_wire(worker_pb2.WeightsBroadcast(**VALID)).within_s == 50.0  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=problem):
        WeightsBroadcast.from_wire(worker_pb2.WeightsBroadcast(**(VALID | changes)))  # type: ignore[arg-type]
