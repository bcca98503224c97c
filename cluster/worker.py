"""`python -m cluster.worker --config FILE`: a worker as a plain process that can change its role.

As `python -m prefill_worker` and `python -m decode_worker`, with one service more, `WorkerHost`, at `host` of the ready
line: whoever supervises the process lets it serve in the other role by it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

import grpc.aio
import uvloop

from cluster.role_host import RoleHost
from penstock import log
from penstock.config import WorkerConfig, load, with_secret_file
from penstock.ending import Ending
from penstock.errors import InvalidInput, PenstockError
from penstock.grpc_server import GrpcServer, typed_errors
from penstock.start_progress import Stages, on_terminal
from penstock.trust import Trust
from penstock.types import Role, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from penstock.worker_main import ended, first_of, leave_in_order, ready_line


class HostService(worker_pb2_grpc.WorkerHostServicer):
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
            return worker_pb2.HostFlipResponse(epoch=self._host.epoch, address=self._host.address)


def main() -> int:
    """The process's exit status, as `penstock.worker_main.main`'s."""
    parser = argparse.ArgumentParser(prog="python -m cluster.worker", description=__doc__)
    parser.add_argument("--config", required=True, help="a WorkerConfig, TOML or JSON")
    parser.add_argument("--spare", action="store_true", help="serve only once WorkerHost has given a name and a role")
    parser.add_argument("--secret-file", help="security.secret_file, where the configuration does not say")
    try:
        arguments = parser.parse_args()
        config = with_secret_file(load(WorkerConfig, arguments.config), arguments.secret_file)
        log.set_up(config.worker_id)
        return uvloop.run(_serve(config, waits=arguments.spare))
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return 2


async def _serve(config: WorkerConfig, *, waits: bool) -> int:
    host, ending = RoleHost(config, waits=waits), Ending()
    with on_terminal(config.worker_id) as tell:
        await host.start(Stages(tell))
    control = await _start_control(config, host)
    ready = {**ready_line(host.worker_id, host), "host": f"{config.host}:{control.port}"}
    print(json.dumps(ready), flush=True)
    await first_of(ending.asked.wait(), ended(host.failed))
    if not host.failed.done():
        await first_of(leave_in_order(host, config.drain_s), ending.at_once.wait(), ended(host.failed))
    if host.failed.done():
        os._exit(1)  # as in `penstock.worker_main`
    await control.stop()
    await host.stop()
    return 0


async def _start_control(config: WorkerConfig, host: RoleHost) -> GrpcServer:
    server = Trust(config.security).server([worker_pb2.DESCRIPTOR.services_by_name["WorkerHost"]])
    worker_pb2_grpc.add_WorkerHostServicer_to_server(HostService(host), server.server)
    await server.start(config.host, 0)
    await server.set_serving(True)
    return server


if __name__ == "__main__":
    sys.exit(main())
