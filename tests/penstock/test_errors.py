"""Tests that errors keep their type, field and hint across a process boundary."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from penstock import errors


@pytest.mark.parametrize("kind", errors._TYPES)
def test_every_type_survives_the_wire(kind: type[errors.PenstockError]) -> None:
    error = kind("what went wrong")
    back = errors.from_status(errors.to_status(error))
    assert (type(back), back.message) == (kind, "what went wrong")


def test_bad_input_keeps_its_field() -> None:
    status = errors.to_status(errors.InvalidInput("sampling.top_p", "is 2; give at most 1"))
    violation = error_details_pb2.BadRequest()
    assert any(packed.Unpack(violation) for packed in status.details)
    assert violation.field_violations[0].field == "sampling.top_p"
    back = errors.from_status(status)
    assert isinstance(back, errors.InvalidInput)
    assert (back.field, back.problem) == ("sampling.top_p", "is 2; give at most 1")


def test_a_retry_hint_survives() -> None:
    back = errors.from_status(errors.to_status(errors.Overloaded("full", retry_after_s=1.5)))
    assert isinstance(back, errors.Overloaded)
    assert back.retry_after_s == 1.5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InternalError),
    ],
)
def test_a_foreign_status_takes_the_type_of_its_code(code: grpc.StatusCode, kind: type[errors.PenstockError]) -> None:
    back = errors.from_status(status_pb2.Status(code=code.value[0], message="from afar"))
    assert type(back) is kind


def test_http_and_grpc_status_agree_on_who_can_fix_the_error() -> None:
    for kind in (*errors._TYPES, errors.InvalidInput):
        caller_can_mend_it = (
            kind.code
            in {
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.CANCELLED,
            }
            or kind is errors.WeightsReplaced
        )  # by sending the request again
        assert (400 <= kind.http_status < 500) == caller_can_mend_it
