"""`python -m router --config FILE`: runs a router as a plain process.

Prints one JSON line with its addresses once it can serve requests. SIGTERM ends it gracefully: it refuses new requests
and gives streams in flight up to `drain_s` to end. SIGINT, or a second SIGTERM, ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Coroutine

import uvloop

from penstock.config import RouterConfig, load_process
from penstock.errors import PenstockError
from penstock.process.setup import Shutdown, favour_event_loop, freeze_heap, return_freed_memory, set_up_logging
from penstock.rpc.addresses import LOOPBACK
from router.server import RouterServer


def main() -> int:
    """Runs the router. Returns the exit status, which is 2 for a problem that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", required=True, help="a RouterConfig, TOML or JSON")
    parser.add_argument("--secret-file", help="security.secret_file, unless the configuration names one")
    parser.add_argument("--peer-host", metavar="HOST", help="peer_host: this machine's address, for other routers")
    try:
        arguments = parser.parse_args()
        overrides = {"peer_host": arguments.peer_host} if arguments.peer_host else {}
        config = load_process(RouterConfig, arguments.config, arguments.secret_file, overrides)
        set_up_logging("router")
        uvloop.run(_serve(config))
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


async def _serve(config: RouterConfig) -> None:
    shutdown = Shutdown()
    return_freed_memory()
    favour_event_loop()
    server = RouterServer(config)
    await server.start()
    server.warm_up()
    freeze_heap()
    try:
        if await _until_ready(server, shutdown.requested):
            ports, host = server.ports, config.host
            addresses = {"grpc": f"{host}:{ports.grpc}", "http": f"{host}:{ports.http}"}
            metrics = {"metrics": f"{host}:{ports.metrics}"} if ports.metrics else {}
            ready: dict[str, object] = {**addresses, **metrics, "control": f"{LOOPBACK}:{ports.control}"}
            ready |= {"peer": server.fleet.peers.address, "pid": os.getpid()}
            print(json.dumps(ready), flush=True)
            await shutdown.requested.wait()
            await _leave(server, config.drain_s, shutdown.immediate)
    finally:
        await server.stop()


async def _leave(server: RouterServer, drain_s: float, immediate: asyncio.Event) -> None:
    await _first_of(server.leave(drain_s), immediate.wait())


async def _until_ready(server: RouterServer, stopped: asyncio.Event) -> bool:
    """Returns True once the router can serve requests, False if the process is to stop first."""
    await _first_of(server.wait_ready(), stopped.wait())
    return not stopped.is_set()


async def _first_of(*waits: Coroutine[object, object, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
