"""`python -m prefill_worker` and `python -m decode_worker`: a worker as a plain process.

Prints one JSON line with its address once a request would succeed, and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

from penstock import log
from penstock.config import WorkerConfig, load, with_secret_file
from penstock.errors import PenstockError
from penstock.types import Epoch, Role


class WorkerServer(Protocol):
    """A worker process's server, whatever its role."""

    role: Role
    epoch: Epoch
    address: str
    failed: asyncio.Future[None]

    async def start(self, on_progress: Callable[[float], None] = ...) -> None: ...

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
    server = make_server(config)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    ready = {
        "worker_id": config.worker_id,
        "epoch": server.epoch,
        "role": server.role.value,
        "address": server.address,
        "pid": os.getpid(),
    }
    print(json.dumps(ready), flush=True)
    stopping = asyncio.create_task(_wait_for(stopped))
    await asyncio.wait([stopping, server.failed], return_when=asyncio.FIRST_COMPLETED)
    if server.failed.done():
        # The step loop is dead, and with it every request here: leave at once, so that routers notice. An orderly
        # end of the interpreter would wait for, or be aborted by, the threads of the transports.
        os._exit(1)
    await server.stop()
    return 0


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()
