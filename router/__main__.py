"""`python -m router --config FILE`: a router as a plain process.

Prints one JSON line with its addresses once a request would succeed. SIGTERM ends it in good order: no new requests,
and `drain_s` for the streams under way. SIGINT, or a second SIGTERM, ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

import uvloop

from penstock import log
from penstock.config import RouterConfig, load, with_secret_file
from penstock.ending import Ending
from penstock.errors import PenstockError
from router.server import RouterServer


def main() -> int:
    """The process's exit status: 2 for a problem that the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", required=True, help="a RouterConfig, TOML or JSON")
    parser.add_argument("--secret-file", help="security.secret_file, where the configuration does not say")
    try:
        arguments = parser.parse_args()
        config = with_secret_file(load(RouterConfig, arguments.config), arguments.secret_file)
        log.set_up("router")
        uvloop.run(_serve(config))
    except PenstockError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


async def _serve(config: RouterConfig) -> None:
    ending = Ending()
    server = RouterServer(config)
    await server.start()
    try:
        if await _until_ready(server, ending.asked):
            ports, host = server.ports, config.host
            ready = {"grpc": f"{host}:{ports.grpc}", "http": f"{host}:{ports.http}", "pid": os.getpid()}
            print(json.dumps(ready), flush=True)
            await ending.asked.wait()
            await _leave(server, config.drain_s, ending.at_once)
    finally:
        await server.stop()


async def _leave(server: RouterServer, drain_s: float, at_once: asyncio.Event) -> None:
    leaving, hurried = asyncio.create_task(server.leave(drain_s)), asyncio.create_task(at_once.wait())
    await asyncio.wait([leaving, hurried], return_when=asyncio.FIRST_COMPLETED)
    for task in (leaving, hurried):
        task.cancel()


async def _until_ready(server: RouterServer, stopped: asyncio.Event) -> bool:
    """False where the process is told to stop first."""
    ready = asyncio.ensure_future(server.wait_ready())
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait([ready, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in (ready, stopping):
        task.cancel()
    return not stopped.is_set()


if __name__ == "__main__":
    sys.exit(main())
