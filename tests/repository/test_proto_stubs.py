"""Tests that the generated stubs match proto/, and the rules of the public messages."""

from __future__ import annotations

from penstock.v1 import common_pb2, inference_pb2
from tests.support.repository.stubs import stale


def test_the_stubs_are_fresh() -> None:
    assert stale() == []


def test_every_scalar_sampling_field_is_optional() -> None:
    for field in common_pb2.SamplingParams.DESCRIPTOR.fields:
        if not field.is_repeated:
            assert field.has_presence, f"{field.name}: a proto3 zero would pass for a value"


def test_public_messages_have_no_field_that_steers_a_transfer() -> None:
    steering = ("transfer", "page", "epoch", "salt", "offer", "worker_address", "candidate")
    request = inference_pb2.GenerateRequest.DESCRIPTOR
    fields = [*request.fields, *common_pb2.SamplingParams.DESCRIPTOR.fields]
    # A tenant chooses it, in addition to the tenant's own salt.
    names = {field.name for field in fields} - {"cache_salt"}
    assert not [name for name in names if any(word in name for word in steering)]
