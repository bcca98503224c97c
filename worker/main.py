"""Runs a worker as a plain process: `python -m prefill_worker` or `python -m decode_worker`.

Prints one JSON line with its address once a request would succeed. SIGTERM drains it: routers learn that it takes no
new work, a controller migrates what it can, and the rest finishes here within `drain_s`. SIGINT or a second SIGTERM
ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.config import WorkerConfig, load_process
from penstock.errors import PenstockError
from penstock.process import Shutdown, set_up_logging
from penstock.types import Epoch, Role
from worker.start_progress import StartReporter, progress_bar

QUIET_S = 0.25  # time for requests on their way from routers that do not know yet


class WorkerServer(Protocol):
    """The server of a worker process of either role."""

    failed: asyncio.Future[None]

    @property
    def role(self) -> Role: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def address(self) -> str: ...

    async def start(self, progress: StartReporter = ...) -> None: ...

    async def leave(self) -> None: ...

    async def wait_idle(self, timeout_s: float) -> bool: ...

    async def stop(self) -> None: ...


def main(make_server: Callable[[WorkerConfig], WorkerServer], run: Callable[..., int] = asyncio.run) -> int:
    """Runs the worker. Returns the exit status: 0 after a stop, 1 if the step loop died, 2 if the user can correct the
    problem.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="a WorkerConfig, TOML or JSON")
    parser.add_argument("--secret-file", help="security.secret_file, if the configuration does not name it")
    try:
        arguments = parser.parse_args()
        config = load_process(WorkerConfig, arguments.config, arguments.secret_file)
        set_up_logging(config.worker_id)
        return run(_serve(config, make_server))
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return 2


async def _serve(config: WorkerConfig, make_server: Callable[[WorkerConfig], WorkerServer]) -> int:
    server, shutdown = make_server(config), Shutdown()
    with progress_bar(config.worker_id) as report:
        await server.start(StartReporter(report))
    print(json.dumps(ready_line(config.worker_id, server)), flush=True)
    await wait_first(shutdown.requested.wait(), wait_done(server.failed))
    if not server.failed.done():
        await wait_first(drain_server(server, config.drain_s), shutdown.immediate.wait(), wait_done(server.failed))
    if server.failed.done():
        # The step loop is dead, and with it every request here, so exit at once for routers to notice. An orderly end
        # of the interpreter would wait for the transports' threads or be aborted by them.
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


async def drain_server(server: WorkerServer, drain_s: float) -> bool:
    """Takes no new work, and returns True once no request or page is left, or False after `drain_s`."""
    deadline_s = asyncio.get_running_loop().time() + drain_s
    await server.leave()
    while await server.wait_idle(max(0.0, deadline_s - asyncio.get_running_loop().time())):
        await asyncio.sleep(min(QUIET_S, drain_s))
        if await server.wait_idle(0.0):
            return True
    return False


async def wait_done(future: asyncio.Future[None]) -> None:
    """Waits for the future's end without raising its error."""
    await asyncio.wait([future])


async def wait_first(*awaitables: Awaitable[object]) -> None:
    """Waits for the first of them and cancels the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
