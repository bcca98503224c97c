"""`python -m prefill_worker` and `python -m decode_worker`: a worker as a plain process.

Prints one JSON line with its address once a request would succeed. SIGTERM ends it in good order: routers hear that it
wants no new work, a controller moves away what can move, the rest ends here within `drain_s`. SIGINT, or a second
SIGTERM, ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock import log
from penstock.config import WorkerConfig, load, with_secret_file
from penstock.ending import Ending
from penstock.errors import PenstockError
from penstock.start_progress import Stages, on_terminal
from penstock.types import Epoch, Role

QUIET_S = 0.25  # a router may have sent something before it heard that the worker leaves


class WorkerServer(Protocol):
    """A worker process's server, whatever its role."""

    failed: asyncio.Future[None]

    @property
    def role(self) -> Role: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def address(self) -> str: ...

    async def start(self, stages: Stages = ...) -> None: ...

    async def leave(self) -> None: ...

    async def wait_idle(self, timeout_s: float) -> bool: ...

    async def stop(self) -> None: ...


def main(make_server: Callable[[WorkerConfig], WorkerServer], run: Callable[..., int] = asyncio.run) -> int:
    """The process's exit status: 0 after a stop, 1 when the step loop died, 2 for a problem that the user can mend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="a WorkerConfig, TOML or JSON")
    parser.add_argument("--secret-file", help="security.secret_file, where the configuration does not say")
    try:
        arguments = parser.parse_args()
        config = with_secret_file(load(WorkerConfig, arguments.config), arguments.secret_file)
        log.set_up(config.worker_id)
        return run(_serve(config, make_server))
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return 2


async def _serve(config: WorkerConfig, make_server: Callable[[WorkerConfig], WorkerServer]) -> int:
    server, ending = make_server(config), Ending()
    with on_terminal(config.worker_id) as tell:
        await server.start(Stages(tell))
    print(json.dumps(ready_line(config.worker_id, server)), flush=True)
    await first_of(ending.asked.wait(), ended(server.failed))
    if not server.failed.done():
        await first_of(leave_in_order(server, config.drain_s), ending.at_once.wait(), ended(server.failed))
    if server.failed.done():
        # The step loop is dead, and with it every request here: leave at once, so that routers notice. An orderly
        # end of the interpreter would wait for, or be aborted by, the threads of the transports.
        os._exit(1)
    await server.stop()
    return 0


def ready_line(worker_id: str, server: WorkerServer) -> dict[str, object]:
    return {
        "worker_id": worker_id,
        "epoch": server.epoch,
        "role": server.role.value,
        "address": server.address,
        "pid": os.getpid(),
    }


async def leave_in_order(server: WorkerServer, drain_s: float) -> bool:
    """Takes no new work and returns once nothing is left; False where time is up before."""
    deadline_s = asyncio.get_running_loop().time() + drain_s
    await server.leave()
    while await server.wait_idle(max(0.0, deadline_s - asyncio.get_running_loop().time())):
        await asyncio.sleep(min(QUIET_S, drain_s))
        if await server.wait_idle(0.0):
            return True
    return False


async def ended(future: asyncio.Future[None]) -> None:
    await asyncio.wait([future])


async def first_of(*awaitables: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
