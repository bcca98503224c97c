"""Waits, from outside, until a deployment is as it should be: looks again after each event, and polls nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from penstock.errors import DeadlineExceeded
from penstock.v1 import admin_pb2, admin_pb2_grpc

_CALL_TIMEOUT_S = 10.0

Settled = Callable[[admin_pb2.StatusResponse], bool]


def all_ready(status: admin_pb2.StatusResponse) -> bool:
    return status.ready and all(worker.state == "ready" for worker in status.workers)


def pool_settled(pool: str, replicas: int) -> Settled:
    """As many workers as wanted, all of them ready, none on its way out."""

    def settled(status: admin_pb2.StatusResponse) -> bool:
        states = [worker.state for worker in status.workers if worker.member.role == pool]
        return states == ["ready"] * replicas

    return settled


def wait_until(
    stub: admin_pb2_grpc.AdminStub, metadata: Any, settled: Settled, timeout_s: float
) -> admin_pb2.StatusResponse:
    """The first status that is settled. Raises DeadlineExceeded that says who is missing."""
    deadline_s = time.monotonic() + timeout_s
    kept = list(stub.Events(admin_pb2.EventsRequest(), timeout=_CALL_TIMEOUT_S, metadata=metadata))
    last = kept[-1].number if kept else 0
    status = admin_pb2.StatusResponse()
    for _ in _ticks(stub, metadata, last, deadline_s):
        status = stub.Status(admin_pb2.StatusRequest(), timeout=_CALL_TIMEOUT_S, metadata=metadata)
        if settled(status):
            return status
    away = [
        f"{one.member.worker_id} is {one.state} {one.detail}".strip() for one in status.workers if one.state != "ready"
    ]
    missing = "; ".join(away) or "every worker is ready, yet it is not as it should be"
    raise DeadlineExceeded(f"not within {timeout_s:g} s: {missing}")


def _ticks(stub: admin_pb2_grpc.AdminStub, metadata: Any, last: int, deadline_s: float) -> Iterator[None]:
    """One at once, and one after each event until time is up."""
    yield
    request = admin_pb2.EventsRequest(after=last, follow=True)
    call = stub.Events(request, timeout=max(0.1, deadline_s - time.monotonic()), metadata=metadata)
    try:
        for _ in call:
            yield
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    finally:
        call.cancel()
