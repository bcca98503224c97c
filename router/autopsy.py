"""Whether a worker's process has died, or is merely out of this router's reach."""

from __future__ import annotations

import grpc.aio

from penstock.errors import nobody_listens
from penstock.grpc_server import Dial
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 1.0


async def is_dead(dial: Dial, address: str, epoch: Epoch) -> bool:
    """True only where it is certain: nobody listens at its address, or another incarnation answers there."""
    async with dial(address) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return nobody_listens(error)
        return Epoch(description.epoch) != epoch
