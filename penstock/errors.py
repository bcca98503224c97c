"""Defines typed errors, each with its gRPC and HTTP status.

An input error names the field, the value and the fix. Every error crosses a process boundary as a gRPC status with
google.rpc details (`to_status`, `from_status`), so that a client sees the type that a handler raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "penstock"
STATUS_DETAILS = "grpc-status-details-bin"  # trailing metadata with the google.rpc.Status of an error
_MAX_TEXT_BYTES = 800  # limit of a message, which is sent twice: percent-encoded and in base64


class PenstockError(Exception):
    """The base of every error that Penstock raises on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(PenstockError):
    """The caller can correct this error: `field` is at fault, and the message holds its value and the fix."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    reason = "INVALID_INPUT"

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(self.named(field))

    def named(self, field: str) -> str:
        """Returns the message with another name for the field, as another API calls it."""
        separator = " " if self.problem.startswith("= ") else ": "
        return f"{field}{separator}{self.problem}"


class Unauthenticated(PenstockError):
    """The caller sent no valid credentials. The message never repeats the ones it sent."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    reason = "UNAUTHENTICATED"


class PermissionDenied(PenstockError):
    """The caller is known but may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    reason = "PERMISSION_DENIED"


class ModelNotFound(PenstockError):
    code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    reason = "MODEL_NOT_FOUND"


class CheckpointError(PenstockError):
    """A model folder cannot be served; the message names the file, its content and the fix."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500
    reason = "CHECKPOINT"


class ConfigError(PenstockError):
    """The configuration cannot work; the message names the key, its value and the fix."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500
    reason = "CONFIG"


class DeadlineExceeded(PenstockError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """`retry_after_s` is set if the request was refused at once because it could not have met its deadline."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(PenstockError):
    code = grpc.StatusCode.CANCELLED
    http_status = 499
    reason = "CANCELLED"


class Unavailable(PenstockError):
    """No process can serve the request now; a retry may succeed after `retry_after_s` seconds."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    reason = "OVERLOADED"


class AdapterUnavailable(Unavailable):
    """This worker cannot serve the adapter now, but another may. The message names the adapter and the fix."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER"


class SequenceMoved(Unavailable):
    """The sequence has migrated: continuing it elsewhere needs no recompute and does not count as a retry."""

    reason = "MOVED"


class WorkerPaused(Unavailable):
    """The worker pauses while its weights are replaced: the request continues there afterwards, or elsewhere, and no
    retry is counted."""

    reason = "PAUSED"


class WeightsReplaced(PenstockError):
    """An update of the weights has ended the request; sent again, it is served with the new ones."""

    code = grpc.StatusCode.ABORTED
    http_status = 409
    reason = "WEIGHTS_REPLACED"


class Quarantined(PenstockError):
    """The request has killed worker processes and is not dispatched again."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 422
    reason = "QUARANTINED"


class TransferError(PenstockError):
    """A KV transfer failed. The request continues with another prefill worker or a local prefill."""

    code = grpc.StatusCode.ABORTED
    http_status = 500
    reason = "TRANSFER"


class TransferRefused(TransferError):
    """The page layouts of two workers are incompatible; the message holds both digests."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "TRANSFER_REFUSED"


class InternalError(PenstockError):
    """A fault of Penstock itself."""


_TYPES: tuple[type[PenstockError], ...] = (
    Unauthenticated,
    PermissionDenied,
    ModelNotFound,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    Cancelled,
    Unavailable,
    Overloaded,
    AdapterUnavailable,
    SequenceMoved,
    WorkerPaused,
    WeightsReplaced,
    Quarantined,
    TransferError,
    TransferRefused,
    InternalError,
)
_BY_REASON = {error.reason: error for error in _TYPES}
_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class _Details:
    reason: str | None = None
    field: str | None = None
    problem: str | None = None
    retry_after_s: float | None = None


def to_status(error: PenstockError) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error, with ErrorInfo and, if they apply, BadRequest and RetryInfo."""
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))]
    if isinstance(error, InvalidInput):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=clip(error.field), description=clip(error.problem)
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(_pack(retry))
    return status_pb2.Status(code=error.code.value[0], message=clip(error.message), details=details)


def clip(text: str) -> str:
    """Shortens a text that may repeat a caller's value, since gRPC limits all trailers of a call to 8 KiB."""
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= _MAX_TEXT_BYTES else encoded[:_MAX_TEXT_BYTES].decode(errors="ignore") + "..."


def from_status(status: status_pb2.Status) -> PenstockError:
    """Returns the typed error of a status; an unknown reason gives the base type of the status code."""
    found = _read_details(status)
    if found.field is not None:
        return InvalidInput(found.field, found.problem or status.message)
    kind = _BY_REASON.get(found.reason or "")
    if kind is None:
        kind = _BY_CODE.get(_CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN), InternalError)
    if issubclass(kind, Unavailable | DeadlineExceeded):
        return kind(status.message, found.retry_after_s)
    return kind(status.message)


def refuses_connections(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether the call failed because no process listens at the address any more."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in (error.details() or "").lower()


def from_rpc_error(error: grpc.RpcError) -> PenstockError:
    """Returns the typed error of a failed call of `grpc` or `grpc.aio`."""
    for key, value in error.trailing_metadata() or ():  # type: ignore[attr-defined]
        if key == STATUS_DETAILS:
            return from_status(status_pb2.Status.FromString(value))
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    return from_status(status_pb2.Status(code=code.value[0], message=error.details() or ""))  # type: ignore[attr-defined]


_BY_CODE: dict[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.ABORTED: TransferError,
}


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed


def _read_details(status: status_pb2.Status) -> _Details:
    reason = field = problem = None
    retry_after_s: float | None = None
    for packed in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            reason = info.reason
        elif packed.Unpack(bad) and bad.field_violations:
            field, problem = bad.field_violations[0].field, bad.field_violations[0].description
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return _Details(reason, field, problem, retry_after_s)


assert all(error.code.value[0] in code_pb2.Code.values() for error in _TYPES)
