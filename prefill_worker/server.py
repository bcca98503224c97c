"""A prefill worker as a process has it: engine, sender, step loop and gRPC server, started and stopped together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from engine.checkup import check_up
from engine.replica import Replica
from engine.step_loop import StepLoop
from engine.worker_identity import describe
from kv_transfer.sender import TransferSender
from penstock.config import WorkerConfig
from penstock.errors import ConfigError
from penstock.trust import Trust
from penstock.types import Epoch, Role
from penstock.v1 import worker_pb2, worker_pb2_grpc
from penstock.worker_service import WorkerService
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker


class PrefillServer:
    """`start` returns once a request would succeed; `failed` ends with the error of a step loop that died."""

    role = Role.PREFILL

    def __init__(self, config: WorkerConfig, replica: Replica | None = None) -> None:
        """`replica`: loaded already, and nobody else works with it any more."""
        if config.role is not Role.PREFILL:
            raise ConfigError(f"role = {config.role.value}: this is a prefill worker; set role = 'prefill'")
        self._config = config
        self.epoch = Epoch(time.time_ns())
        self.address = ""
        self.replica = replica
        self.worker: PrefillWorker
        self._loop: StepLoop
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, on_progress: Callable[[float], None] = lambda share: None) -> None:
        """Raises CheckpointError or ConfigError; `on_progress` hears the share of the weights loaded, 0 to 1."""
        trust = Trust(self._config.security)
        if self.replica is None:
            self.replica = await asyncio.to_thread(Replica.load, self._config.engine, on_progress)
        engine, events = self.replica.engine, self.replica.events
        self._sender = TransferSender(
            engine.kv_pages,
            engine.layout,
            self.epoch,
            self._config.transfer,
            on_done=lambda key: self._loop.post(lambda: self.worker.on_sent(key)),
            on_failure=lambda key, error: self._loop.post(lambda: self.worker.on_send_failure(key, error)),
        )
        description = describe(engine, self._config, self.epoch)
        description.transports.extend(self._sender.transports)
        description.chunk_tokens = self._config.prefill.max_batch_tokens or engine.saturating_tokens
        worker = self.worker = PrefillWorker(engine, self._sender, self._config, description.context_length)
        self._loop = StepLoop(self._config.worker_id, self._step, self._on_fatal, worker.sweep)
        self._service = WorkerService(
            description, events, lambda: worker.load, worker.is_open, partial(check_up, engine, self._config.engine)
        )
        names = worker_pb2.DESCRIPTOR.services_by_name
        self._grpc = trust.server([names["Worker"], names["PrefillWorker"]])
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._grpc.server)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(PrefillService(worker, self._loop), self._grpc.server)
        self._running = asyncio.get_running_loop()
        self._loop.start()
        port = await self._grpc.start(self._config.host, self._config.port)
        self.address = f"{self._config.host}:{port}"
        await self._grpc.set_serving(True)

    def _step(self) -> bool:
        worked = self.worker.step()
        self._service.notify()
        return worked

    def _on_fatal(self, error: BaseException) -> None:
        def fail() -> None:
            if not self.failed.done():
                self.failed.set_exception(error)

        self._running.call_soon_threadsafe(fail)

    async def leave(self) -> None:
        """Tells routers to send nothing more; what is here goes on."""
        self._service.leave()
        await self._grpc.set_serving(False)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until there is no job and no page is held; False when time is up."""
        return await self._service.wait_idle(timeout_s)

    async def stop(self) -> None:
        """Ends every prefill, waits until nothing is being written, then closes the port."""
        await self._grpc.set_serving(False)
        self._service.close()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._sender.shutdown)
        await self._grpc.stop()
