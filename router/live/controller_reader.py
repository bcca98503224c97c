"""Reads the controller's events and the autoscaler's reasons from the Admin service, at most once a second.

A router proves itself an operator with the admin token of the deployment's secret. Where it has no secret, or the Admin
service is away, the page goes without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc

from penstock.rpc.server import Dial
from penstock.v1 import admin_pb2, admin_pb2_grpc

_FRESH_S = 1.0
_TIMEOUT_S = 2.0
_MAX_EVENTS = 200
_MAX_RECORDS = 10

ControllerState = tuple[Sequence[admin_pb2.ClusterEvent], admin_pb2.ExplainResponse]


class ControllerReader:
    """Keeps the last answer, so that many open pages cost the controller no more than one."""

    def __init__(self, address: str, dial: Dial) -> None:
        """`address` is the Admin service's, "" where there is none; `dial` opens channels with an operator's token."""
        self._address = address
        self._dial = dial
        self._read_s = 0.0
        self._state: ControllerState = ((), admin_pb2.ExplainResponse())

    async def read(self) -> ControllerState:
        """Returns what the controller said last. Waits at most two seconds."""
        now_s = time.monotonic()
        if self._address and now_s - self._read_s >= _FRESH_S:
            self._read_s = now_s  # set before the calls, so that other pages use the last answer meanwhile
            try:
                self._state = await self._call()
            except grpc.RpcError:
                return self._state  # shown until the controller is back; the log of the membership says why it is away
        return self._state

    async def _call(self) -> ControllerState:
        async with self._dial(self._address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            request = admin_pb2.EventsRequest()
            events = [event async for event in stub.Events(request, timeout=_TIMEOUT_S)]
            explain = admin_pb2.ExplainRequest(limit=_MAX_RECORDS)
            return events[-_MAX_EVENTS:], await stub.Explain(explain, timeout=_TIMEOUT_S)
