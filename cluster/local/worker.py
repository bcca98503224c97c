"""`python -m cluster.local.worker --config FILE`: a worker as a plain process that can change its role.

Works like `python -m prefill_worker` and `python -m decode_worker`, with one more service, `WorkerHost`, at the address
`host` of the ready line. The process's supervisor calls it to change the role or the weights.
"""

from __future__ import annotations

import asyncio
import json
import sys

import grpc.aio
import uvloop

from cluster.local.role_host import RoleHost
from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast
from penstock.config import LoadedWeightsConfig, WorkerConfig
from penstock.errors import InvalidInput
from penstock.process.setup import Shutdown
from penstock.rpc.server import GrpcServer, typed_errors
from penstock.rpc.trust import Trust
from penstock.types import PauseMode, Role, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.main import make_parser, ready_line, run_worker, serve_until_drained
from worker.start_progress import StartReporter, progress_bar

PAUSE_WAIT_S = 60.0  # for which `wait` lets requests run, unless the caller says how long


class WorkerHostService(worker_pb2_grpc.WorkerHostServicer):
    """Changes the role and the weights of the process's worker, one change at a time."""

    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._flipping = asyncio.Lock()

    async def Flip(
        self, request: worker_pb2.HostFlipRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HostFlipResponse:
        async with typed_errors(context), self._flipping:
            if request.role not in list(Role):
                raise InvalidInput("role", f"is {request.role!r}; give {' or '.join(Role)}")
            await self._host.flip(WorkerId(request.worker_id), Role(request.role))
            return self._serving()

    async def ReceiveWeights(
        self, request: worker_pb2.ReceiveWeightsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReceiveWeightsResponse:
        async with typed_errors(context), self._flipping:
            member = BroadcastMember(request.rank, request.num_ranks, request.save_to)
            await self._host.receive_weights(WeightsBroadcast.from_wire(request.broadcast), member)
            return worker_pb2.ReceiveWeightsResponse()

    async def PrepareWeights(
        self, request: worker_pb2.LoadedWeights, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PrepareWeightsResponse:
        async with typed_errors(context), self._flipping:
            weights = LoadedWeightsConfig(version=_positive(request.version), path=request.path, digest=request.digest)
            await self._host.prepare_weights(weights)
            return worker_pb2.PrepareWeightsResponse()

    async def ApplyWeights(
        self, request: worker_pb2.ApplyWeightsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HostFlipResponse:
        async with typed_errors(context), self._flipping:
            if request.mode not in list(PauseMode):
                raise InvalidInput("mode", f"is {request.mode!r}; give {', '.join(PauseMode)}")
            await self._host.apply_weights(PauseMode(request.mode), request.timeout_s or PAUSE_WAIT_S)
            return self._serving()

    async def DiscardWeights(
        self, request: worker_pb2.DiscardWeightsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DiscardWeightsResponse:
        async with typed_errors(context), self._flipping:
            await self._host.discard_weights()
            return worker_pb2.DiscardWeightsResponse()

    def _serving(self) -> worker_pb2.HostFlipResponse:
        return worker_pb2.HostFlipResponse(epoch=self._host.epoch, address=self._host.address)


def _positive(version: int) -> int:
    if not version:
        raise InvalidInput("version", "is 0, which names the checkpoint's own weights; give 1 or more")
    return version


def main() -> int:
    """Runs the worker and returns the exit status, as `worker.main.run_worker` does."""
    parser = make_parser(prog="python -m cluster.local.worker", description=__doc__)
    parser.add_argument(
        "--spare", action="store_true", help="serve only once WorkerHost has given it a name and a role"
    )
    return run_worker(parser, lambda config, arguments: _serve(config, is_spare=arguments.spare), uvloop.run)


async def _serve(config: WorkerConfig, *, is_spare: bool) -> int:
    host, shutdown = RoleHost(config, is_spare=is_spare), Shutdown()
    with progress_bar(config.worker_id) as report_progress:
        await host.start(StartReporter(report_progress))
    trust = Trust(config.security)
    watching = asyncio.create_task(trust.watcher.follow(), name="key files")
    control = await _start_host_service(config, host, trust)
    ready = {**ready_line(host.worker_id, host), "host": f"{config.host}:{control.port}"}
    print(json.dumps(ready), flush=True)
    await serve_until_drained(host, shutdown, config.drain_s)
    watching.cancel()
    await control.stop()
    await host.stop()
    return 0


async def _start_host_service(config: WorkerConfig, host: RoleHost, trust: Trust) -> GrpcServer:
    server = trust.server([worker_pb2.DESCRIPTOR.services_by_name["WorkerHost"]])
    worker_pb2_grpc.add_WorkerHostServicer_to_server(WorkerHostService(host), server.server)
    await server.start(config.host, 0)
    await server.set_serving(True)
    return server


if __name__ == "__main__":
    sys.exit(main())
