"""Handles requests that kill workers: suspects them after two deaths, retries them alone, and refuses those that kill
another worker.

Every request that was on a worker when it died is re-dispatched. A request that gets no token between two such deaths
becomes a suspect, as do innocent requests that waited beside it. Suspects are retried one at a time: the one that holds
this router's *isolation* lock is cleared by its first token and releases the lock. If the worker of the isolated
request dies, that request is taken to be the cause: it is refused, and so is the same prompt for a while, so that it
does not kill the whole pool. A long stream that survives two deaths received tokens in between and is never a suspect.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import grpc.aio

from penstock.errors import refuses_connections
from penstock.rpc.server import Dial
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

_REMEMBER_S = 600.0
_MAX_REMEMBERED = 10_000
_PROBE_TIMEOUT_S = 1.0


class Suspicion:
    """Counts the tokens of one completion between worker losses. Pure."""

    __slots__ = ("_tokens_at_loss",)

    def __init__(self) -> None:
        self._tokens_at_loss: int | None = None

    def on_worker_lost(self, num_emitted: int) -> bool:
        """Returns whether the completion has received no token since the previous worker was lost."""
        made_no_progress = self._tokens_at_loss == num_emitted
        self._tokens_at_loss = num_emitted
        return made_no_progress


class Quarantine:
    """Owns the isolation lock and the refused prompts, which it keeps for `ttl_s` seconds, for all of a router's
    requests.
    """

    def __init__(self, ttl_s: float = _REMEMBER_S) -> None:
        self._ttl_s = ttl_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # by digest, in order of expiry
        self.isolation = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, token_ids: Sequence[int], now_s: float) -> None:
        digest = _digest(token_ids)
        self._until_s[digest] = now_s + self._ttl_s
        self._until_s.move_to_end(digest)
        if len(self._until_s) > _MAX_REMEMBERED:
            self._until_s.popitem(last=False)

    def holds(self, token_ids: Sequence[int], now_s: float) -> bool:
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        return bool(self._until_s) and _digest(token_ids) in self._until_s


async def is_dead(dial: Dial, address: str, epoch: Epoch) -> bool:
    """Probes a worker's liveness. Returns True only if nothing listens at its address or another epoch answers there.

    A worker that is merely unreachable from this router is not dead.
    """
    async with dial(address) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return refuses_connections(error)
        return Epoch(description.epoch) != epoch


def _digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()
