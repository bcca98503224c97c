"""One supervised process of this machine without Ray: what the controller of a deployment of plain processes holds.

The controller is the same as with Ray, and so are workers and routers. Such a deployment ends with whoever runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from cluster.heartbeats import OnDoubt, follow_router, follow_worker
from cluster.pool import Incarnation
from cluster.supervised import Started
from penstock.config import RouterConfig, WorkerConfig
from penstock.errors import Unavailable, from_rpc_error
from penstock.grpc_server import Dial, make_channel
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

_ROOT = Path(__file__).resolve().parent.parent
_FLIP_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_LEAVE_MARGIN_S = 5.0  # for a router that was told to end to do so, beyond its streams' time
_LOG_TAIL_BYTES = 2000


class PlainProcess:
    """Implements `supervised.SupervisedProcess`."""

    def __init__(
        self,
        config: WorkerConfig | RouterConfig,
        folder: Path,
        name: str,
        dial: Dial = make_channel,
        *,
        is_spare: bool = False,
    ) -> None:
        """Configuration and log of the process are kept in `folder`."""
        self._config = config
        self._is_spare = is_spare
        self._is_router = isinstance(config, RouterConfig)
        self._path, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._dial = dial
        self._process: asyncio.subprocess.Process | None = None
        self._host = ""  # of the service that changes its role
        self._started: Started | None = None

    async def place(self) -> None:
        """This machine is its place."""

    async def start(self) -> Started:
        self._path.write_text(self._config.model_dump_json())
        command = [sys.executable, "-m", "router" if self._is_router else "cluster.worker", "--config", str(self._path)]
        if self._is_spare:
            command.append("--spare")
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        if isinstance(self._config, WorkerConfig) and self._config.engine.num_threads is not None:
            threads = str(self._config.engine.num_threads)
            environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=_ROOT, env=environment
            )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()  # bounded by whoever starts it
        if not line:
            raise Unavailable(f"it ended with status {await self._process.wait()}: {self._tail()}")
        ready = json.loads(line)
        self._host = ready.get("host", "")
        if self._is_router:
            self._started = Started(Epoch(0), ready["grpc"], ready["pid"], ready["http"], ready["grpc"])
        else:
            self._started = Started(Epoch(ready["epoch"]), ready["address"], ready["pid"])
        return self._started

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        assert self._process is not None
        assert self._started is not None
        address, epoch = self._started.address, self._started.epoch
        if not address:  # a spare: nobody asks it anything
            return await self._outlive()
        if self._is_router:
            drain_s = self._config.drain_s + _LEAVE_MARGIN_S
            following = follow_router(address, on_doubt, self._started.pid, drain_s)
        else:
            following = follow_worker(address, epoch, on_load, on_doubt, self._dial)
        living, answering = asyncio.create_task(self._outlive()), asyncio.create_task(following)
        try:
            done, _ = await asyncio.wait([living, answering], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            living.cancel()
            answering.cancel()

    async def _outlive(self) -> str:
        assert self._process is not None
        return f"its process ended with status {await self._process.wait()}"

    async def flip(self, incarnation: Incarnation) -> Started:
        assert self._started is not None
        request = worker_pb2.HostFlipRequest(worker_id=incarnation.worker_id, role=incarnation.pool_name)
        try:
            async with self._dial(self._host) as channel:
                answer = await worker_pb2_grpc.WorkerHostStub(channel).Flip(request, timeout=_FLIP_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self._started = Started(Epoch(answer.epoch), answer.address, self._started.pid)
        return self._started

    async def stop(self, grace_s: float = 0.0) -> None:
        # A worker was emptied before; a router's own `drain_s` bounds its streams.
        await self._end(signal.SIGTERM if self._is_router else signal.SIGINT, grace_s)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals, grace_s: float = 0.0) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        await asyncio.wait_for(self._process.wait(), grace_s + _END_TIMEOUT_S)

    def _tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(no log)"
