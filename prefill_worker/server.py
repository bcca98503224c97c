"""A prefill worker as a process has it: engine, sender, step loop and gRPC server, started and stopped together."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from engine.checkup import check_up
from engine.engine import Engine
from engine.ranks import Launch
from engine.replica import Replica
from engine.step_loop import StepLoop
from engine.worker_identity import describe
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.group_sender import GroupSender
from kv_transfer.lease import earliest
from kv_transfer.page_intake import PageIntake
from kv_transfer.page_source import PageSource
from kv_transfer.rank import launch_ranks
from penstock.channels import Channels
from penstock.config import WorkerConfig
from penstock.errors import ConfigError, TransferError
from penstock.fence_keeper import FenceKeeper
from penstock.handover_client import HandoverClient
from penstock.handover_service import HandoverService
from penstock.start_progress import Stages
from penstock.trust import Trust
from penstock.types import Epoch, Role, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from penstock.worker_service import WorkerService
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker


class PrefillServer:
    """`start` returns once a request would succeed; `failed` ends with the error of a step loop that died."""

    role = Role.PREFILL

    def __init__(self, config: WorkerConfig, replica: Replica | None = None, launch: Launch | None = None) -> None:
        """`replica`: loaded already, and nobody else works with it any more. `launch` starts the processes of other
        ranks, by default plain ones."""
        if config.role is not Role.PREFILL:
            raise ConfigError(f"role = {config.role.value}: this is a prefill worker; set role = 'prefill'")
        self._config = config
        self.epoch = Epoch(time.time_ns())
        self.address = ""
        self.replica = replica
        self._launch = launch or launch_ranks
        self.worker: PrefillWorker
        self._loop: StepLoop
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, stages: Stages | None = None) -> None:
        """Raises CheckpointError or ConfigError; `stages` hears how far it is."""
        stages = stages or Stages()
        trust = Trust(self._config.security)
        if self.replica is None:
            self.replica = await asyncio.to_thread(Replica.load, self._config.engine, stages.on_weights, self._launch)
        engine, events = self.replica.engine, self.replica.events
        self._sender = await asyncio.to_thread(
            GroupSender,
            engine,
            self.epoch,
            self._config.transfer,
            on_done=lambda key: self._loop.post(lambda: self._on_sent(key)),
            on_failure=lambda key, error: self._loop.post(lambda: self._on_send_failure(key, error)),
        )
        description = describe(engine, self._config, self.epoch)
        description.transports.extend(self._sender.transports)
        description.chunk_tokens = self._config.prefill.max_batch_tokens or engine.saturating_tokens
        worker = self.worker = PrefillWorker(engine, self._sender, self._config, description.context_length)
        self._loop = StepLoop(self._config.worker_id, self._step, self._on_fatal, self._sweep)
        self._service = WorkerService(
            description,
            events,
            lambda: worker.load,
            lambda key: worker.is_open(key) or self._sender.is_open(key),
            partial(check_up, engine, self._config.engine),
        )
        names = worker_pb2.DESCRIPTOR.services_by_name
        self._grpc = trust.server([names["Worker"], names["PrefillWorker"], names["PageHandover"]])
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._grpc.server)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(PrefillService(worker, self._loop), self._grpc.server)
        self._channels = Channels(trust.channel)
        worker_pb2_grpc.add_PageHandoverServicer_to_server(self._hand_over_pages(engine), self._grpc.server)
        self._running = asyncio.get_running_loop()
        self._loop.start()
        engine.when_lost(self._on_fatal)
        port = await self._grpc.start(self._config.host, self._config.port)
        self.address = f"{self._config.host}:{port}"
        await self._grpc.set_serving(True)

    def _hand_over_pages(self, engine: Engine) -> HandoverService:
        """Cached pages to and from other workers: nothing else is ever written into this pool."""
        config, post = self._config, self._loop.post
        self.source = PageSource(engine, self._sender)
        intake = self.intake = PageIntake(engine, self._make_receiver, config.transfer.timeout_s, post)
        self._fences = FenceKeeper(self._channels.get, lambda key: post(lambda: intake.on_quiesced(key)))
        client = HandoverClient(self.source, post, self._channels, WorkerId(config.worker_id), self.epoch)
        return HandoverService(client, intake, post, self._fences, self.epoch, lambda: self.address)

    def _make_receiver(self) -> GroupReceiver:
        """Once the first peer's pages are to come: most prefill workers never need it."""
        assert self.replica is not None
        return GroupReceiver(
            self.replica.engine,
            self.epoch,
            self._config.transfer,
            on_arrival=lambda key, first, count: self._loop.post(lambda: self.intake.on_arrival(key, first, count)),
            on_failure=lambda key, error: self._loop.post(lambda: self.intake.on_lost(key, error)),
        )

    def _on_sent(self, key: TransferKey) -> None:
        self.worker.on_sent(key)
        self.source.on_sent(key)

    def _on_send_failure(self, key: TransferKey, error: TransferError) -> None:
        self.worker.on_send_failure(key, error)
        self.source.on_failure(key, error)

    def _sweep(self, now_s: float) -> float | None:
        return earliest(self.worker.sweep(now_s), self.intake.sweep(now_s))

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
        await self._fences.close()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._sender.shutdown)
        await self._grpc.stop()
        await self._channels.close()
        await asyncio.to_thread(self.intake.shutdown)
