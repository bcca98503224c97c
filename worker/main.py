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
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from penstock.config import WorkerConfig, load_process
from penstock.errors import PenstockError
from penstock.process.setup import Shutdown, set_up_logging
from penstock.types import Epoch, Role
from worker.start_progress import StartReporter, progress_bar

QUIET_S = 0.25  # time for requests that routers sent before they learned of the drain


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
    """Runs the worker of a process with one role. Returns the exit status, as `run_worker` does."""
    return run_worker(make_parser(), lambda config, _: _serve(config, make_server), run)


def make_parser(**options: Any) -> argparse.ArgumentParser:
    """Returns the parser of a worker's command line, made with these `options` of ArgumentParser."""
    parser = argparse.ArgumentParser(**options)
    parser.add_argument("--config", required=True, help="a WorkerConfig, TOML or JSON")
    parser.add_argument("--secret-file", help="security.secret_file, if the configuration does not name it")
    return parser


def run_worker(
    parser: argparse.ArgumentParser,
    serve: Callable[[WorkerConfig, argparse.Namespace], Coroutine[Any, Any, int]],
    run: Callable[..., int] = asyncio.run,
) -> int:
    """Reads the command line and the configuration, and serves until the worker ends.

    Returns the exit status: 0 after a stop, 1 if the step loop died, 2 if the user can correct the problem.
    """
    try:
        arguments = parser.parse_args()
        config = _with_device_defaults(load_process(WorkerConfig, arguments.config, arguments.secret_file))
        set_up_logging(config.worker_id)
        return run(serve(config, arguments))
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return 2


def _with_device_defaults(config: WorkerConfig) -> WorkerConfig:
    """Returns the configuration with the defaults of the device that the worker will use."""
    is_gpu = config.engine.device.startswith("cuda")
    if config.engine.device == "auto":
        import torch

        is_gpu = torch.cuda.is_available()
    return config.model_copy(update={"decode": config.decode.on_gpu()}) if is_gpu else config


async def _serve(config: WorkerConfig, make_server: Callable[[WorkerConfig], WorkerServer]) -> int:
    server, shutdown = make_server(config), Shutdown()
    with progress_bar(config.worker_id) as report:
        await server.start(StartReporter(report))
    print(json.dumps(ready_line(config.worker_id, server)), flush=True)
    await serve_until_drained(server, shutdown, config.drain_s)
    await server.stop()
    return 0


async def serve_until_drained(server: WorkerServer, shutdown: Shutdown, drain_s: float) -> None:
    """Returns once a signal has asked for the end and the server is drained, as far as the signal allows.

    Ends the process with status 1 as soon as the step loop has died.
    """
    await _wait_first(shutdown.requested.wait(), _wait_done(server.failed))
    if not server.failed.done():
        await _wait_first(drain_server(server, drain_s), shutdown.immediate.wait(), _wait_done(server.failed))
    if server.failed.done():
        # Every request here is lost with the step loop, so exit at once for routers to notice. An orderly end of the
        # interpreter would wait for the transports' threads or be aborted by them.
        os._exit(1)


def ready_line(worker_id: str, server: WorkerServer) -> dict[str, object]:
    """Returns what the process prints once it is ready, for its supervisor."""
    return {
        "worker_id": worker_id,
        "epoch": server.epoch,
        "role": server.role.value,
        "address": server.address,
        "pid": os.getpid(),
    }


async def drain_server(server: WorkerServer, drain_s: float) -> bool:
    """Refuses new work. Returns True once no request or page is left, or False after `drain_s`."""
    deadline_s = asyncio.get_running_loop().time() + drain_s
    await server.leave()
    while await server.wait_idle(max(0.0, deadline_s - asyncio.get_running_loop().time())):
        await asyncio.sleep(min(QUIET_S, drain_s))
        if await server.wait_idle(0.0):
            return True
    return False


async def _wait_done(future: asyncio.Future[None]) -> None:
    """Waits for the future's end without raising its error."""
    await asyncio.wait([future])


async def _wait_first(*awaitables: Awaitable[object]) -> None:
    """Waits for the first of them and cancels the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
