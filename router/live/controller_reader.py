"""Reads the controller's events and the autoscaler's reasons from the Admin service, at most once a second.

The router calls as an operator, with the admin token derived from the deployment's secret. Without a secret or an Admin
service, the page does not show them.
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
    """Keeps the last answer, so that many open pages cost the controller no more calls than one."""

    def __init__(self, address: str, dial: Dial) -> None:
        """`address` is the Admin service's, or "" if there is none; `dial` opens channels with an operator's token."""
        self._address = address
        self._dial = dial
        self._read_s = 0.0
        self._state: ControllerState = ((), admin_pb2.ExplainResponse())

    async def read(self) -> ControllerState:
        """Returns the controller's last answer. Waits a few seconds at most."""
        now_s = time.monotonic()
        if self._address and now_s - self._read_s >= _FRESH_S:
            self._read_s = now_s  # set before the calls, so that meanwhile other pages get the previous answer
            try:
                self._state = await self._call()
            except grpc.RpcError:
                return self._state  # shown until the controller is back; who follows the membership logs why it is away
        return self._state

    async def _call(self) -> ControllerState:
        async with self._dial(self._address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            request = admin_pb2.EventsRequest()
            events = [event async for event in stub.Events(request, timeout=_TIMEOUT_S)]
            explain = admin_pb2.ExplainRequest(limit=_MAX_RECORDS)
            return events[-_MAX_EVENTS:], await stub.Explain(explain, timeout=_TIMEOUT_S)
