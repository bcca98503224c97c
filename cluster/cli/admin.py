"""Calls to the Admin service: connection, token, errors in an operator's terms, and waiting for a state."""

from __future__ import annotations

import contextlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cluster.cli.options import check_address, client_tls
from cluster.cli.progress import Progress
from penstock.client.auth import auth_metadata
from penstock.errors import DeadlineExceeded, PenstockError, Unauthenticated
from penstock.rpc.admin_token import find_token
from penstock.rpc.failed_call import failed_call
from penstock.rpc.secret import ADMIN, ClusterSecrets
from penstock.v1 import admin_pb2, admin_pb2_grpc

CALL_TIMEOUT_S = 10.0
# Calls that follow events have no deadline; these settings detect a host that does not answer, or no longer does.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.min_reconnect_backoff_ms", 5_000),  # bounds the time to connect
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)

Condition = Callable[[admin_pb2.StatusResponse], bool]


def admin_call(arguments: Namespace, method: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """Makes one unary call and returns its response."""
    with admin_stub(arguments) as (stub, metadata):
        return getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)


def admin_token(arguments: Namespace) -> str:
    """Returns the token made from --secret-file, or else the one left for this account; "" if there is none."""
    if arguments.secret_file:
        return ClusterSecrets.read(arguments.secret_file, "--secret-file").current.token(ADMIN)
    return find_token(arguments.admin)


@contextlib.contextmanager
def admin_stub(arguments: Namespace) -> Iterator[tuple[admin_pb2_grpc.AdminStub, Any]]:
    """Yields a stub and the call metadata, which hold the token left for this account or made from --secret-file.

    Raises Unavailable or Unauthenticated with what to do about it.
    """
    address = arguments.admin
    check_address("--admin", address, "localhost:50052")
    token = admin_token(arguments)
    tls = client_tls(arguments)
    options = [*_CHANNEL_OPTIONS, *(tls.options() if tls else ())]
    with _open_channel(address, tls.credentials() if tls else None, options) as channel:
        try:
            yield admin_pb2_grpc.AdminStub(channel), auth_metadata(token)
        except grpc.RpcError as error:
            raise _with_advice(error, address) from error


def _open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def _with_advice(failed: grpc.RpcError, address: str) -> PenstockError:
    """Returns the error of a failed call, with the fix if the address, the port or the token is wrong."""
    error = failed_call(failed, address, "give the deployment's --admin address, by default port 50052")
    if isinstance(error, Unauthenticated):
        return Unauthenticated(
            f"{address} wants another token; call from the account that runs the deployment, or give its --secret-file"
        )
    return error


def to_json(message: Message, indent: int | None = None) -> str:
    """Returns a message as JSON under the names of the .proto file, fields at their defaults included."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(fields, indent=indent)


def all_ready(status: admin_pb2.StatusResponse) -> bool:
    """Returns whether the deployment answers and every worker is ready."""
    return status.ready and all(worker.state == "ready" for worker in status.workers)


def pool_has_size(pool: str, replicas: int) -> Condition:
    """Returns the condition that `pool` has exactly `replicas` workers, all of them ready."""

    def condition(status: admin_pb2.StatusResponse) -> bool:
        return [worker.state for worker in status.workers if worker.member.role == pool] == ["ready"] * replicas

    return condition


def wait_until(
    stub: admin_pb2_grpc.AdminStub, metadata: Any, condition: Condition, timeout_s: float, text: str
) -> admin_pb2.StatusResponse:
    """Checks the status now and after each cluster event, and returns the first that meets `condition`.

    Meanwhile `text` and the share of the workers that are ready are shown on a terminal.

    Raises DeadlineExceeded that names the workers that are not ready.
    """
    deadline_s = time.monotonic() + timeout_s
    past = list(stub.Events(admin_pb2.EventsRequest(), timeout=CALL_TIMEOUT_S, metadata=metadata))
    last_number = past[-1].number if past else 0
    status = admin_pb2.StatusResponse()
    with Progress(text) as progress:
        for _ in _now_and_after_each_event(stub, metadata, last_number, deadline_s):
            status = stub.Status(admin_pb2.StatusRequest(), timeout=CALL_TIMEOUT_S, metadata=metadata)
            if condition(status):
                return status
            num_ready = sum(worker.state == "ready" for worker in status.workers)
            num_workers = len(status.workers)
            progress.show(f"{text}; {num_ready} of {num_workers} are", num_ready / max(1, num_workers))
    missing = [
        f"{worker.member.worker_id} is {worker.state} {worker.detail}".strip()
        for worker in status.workers
        if worker.state != "ready"
    ]
    reason = "; ".join(missing) or "every worker is ready, but the pools do not have the size asked for"
    raise DeadlineExceeded(f"not within {timeout_s:g} s: {reason}")


def _now_and_after_each_event(
    stub: admin_pb2_grpc.AdminStub, metadata: Any, last_number: int, deadline_s: float
) -> Iterator[None]:
    yield
    request = admin_pb2.EventsRequest(after=last_number, follow=True)
    call = stub.Events(request, timeout=max(0.1, deadline_s - time.monotonic()), metadata=metadata)
    try:
        for _ in call:
            yield
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    finally:
        call.cancel()
