"""A decode worker as a process has it: engine, transfers both ways, step loop, calls to other workers, gRPC server."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from decode_worker.adopt_client import AdoptClient
from decode_worker.adopt_service import AdoptService
from decode_worker.adoptions import LEASE_S, Adoptions
from decode_worker.departures import Departures
from decode_worker.intake import Intake
from decode_worker.lookaside import LookasidePort, LookasideService, load_spelling, lookaside_secret
from decode_worker.placement import describe_limits
from decode_worker.prefill_client import PrefillClient
from decode_worker.service import DecodeService, add_to_server
from decode_worker.step_driver import StepDriver
from decode_worker.transfers import Transfers
from decode_worker.worker import DecodeWorker
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
from penstock.ticket_log import TicketLog
from penstock.trust import Trust
from penstock.types import Epoch, Role, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from penstock.worker_service import WorkerService

log = logging.getLogger(__name__)


class DecodeServer:
    """`start` returns once a request would succeed; `failed` ends with the error of a step loop that died."""

    role = Role.DECODE

    def __init__(self, config: WorkerConfig, replica: Replica | None = None, launch: Launch | None = None) -> None:
        """`replica`: loaded already, and nobody else works with it any more. `launch` starts the processes of other
        ranks, by default plain ones."""
        if config.role is not Role.DECODE:
            raise ConfigError(f"role = {config.role.value}: this is a decode worker; set role = 'decode'")
        self._config = config
        self.epoch = Epoch(time.time_ns())
        self.address = ""
        self.replica = replica
        self._launch = launch or launch_ranks
        self._running = asyncio.get_running_loop()
        self.worker: DecodeWorker
        self._lookaside: LookasidePort | None = None
        self._loop: StepLoop
        self.failed: asyncio.Future[None] = self._running.create_future()

    async def start(self, stages: Stages | None = None) -> None:
        """Raises CheckpointError or ConfigError; `stages` hears how far it is."""
        stages = stages or Stages()
        config = self._config
        if config.lookaside is not None:
            lookaside_secret(config)  # before weights are loaded for nothing
        trust = Trust(config.security)
        if self.replica is None:
            self.replica = await asyncio.to_thread(Replica.load, config.engine, stages.on_weights, self._launch)
        engine, events = self.replica.engine, self.replica.events
        await asyncio.to_thread(engine.capture_graphs, stages.on_graphs, config.decode.max_batch_sequences)
        await asyncio.to_thread(self._open_transfers, engine)
        transfers = Transfers(engine, self._receiver, self.epoch, config.transfer, lambda call: self._loop.post(call))
        description = describe(engine, config, self.epoch)
        description.transports.extend(self._receiver.transports)
        describe_limits(description, config.decode)
        worker = self.worker = DecodeWorker(
            WorkerId(config.worker_id), engine, transfers, config.decode, description.context_length
        )
        self._loop = StepLoop(config.worker_id, self._step, self._on_fatal, self._sweep)
        self._driver = StepDriver(worker, engine, config.worker_id, self._loop.post)
        self._channels = Channels(trust.channel)
        self._fences = FenceKeeper(self._channels.get, lambda key: self._loop.post(lambda: self._on_quiesced(key)))
        self._calls = PrefillClient(self._loop, worker, self._receiver.offer, self._channels, self._fences)
        transfers.calls = self._calls
        moves = self._join_peers(engine, transfers)
        tickets = TicketLog()
        self._service = WorkerService(
            description,
            events,
            lambda: worker.load,
            lambda key: self._adopt_calls.is_open(key) or self._sender.is_open(key),
            partial(check_up, engine, config.engine),
            tickets,
        )
        names = worker_pb2.DESCRIPTOR.services_by_name
        self._grpc = trust.server([names["Worker"], names["DecodeWorker"], names["PageHandover"]])
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._grpc.server)
        intake = Intake(worker, self.adoptions, self._loop)
        add_to_server(DecodeService(intake, moves), self._grpc.server)
        worker_pb2_grpc.add_PageHandoverServicer_to_server(self._hand_over_pages(engine), self._grpc.server)
        self._loop.start()
        engine.when_lost(self._on_fatal)
        if config.lookaside is not None:
            description.lookaside_address = await self._open_lookaside(intake, tickets)
        port = await self._grpc.start(config.host, config.port)
        self.address = f"{config.host}:{port}"
        await self._grpc.set_serving(True)

    async def _open_lookaside(self, intake: Intake, tickets: TicketLog) -> str:
        """The address that clients are told."""
        config = self._config
        spelling = await asyncio.to_thread(load_spelling, config.engine.model)
        worker_id = WorkerId(config.worker_id)
        service = LookasideService(lookaside_secret(config), worker_id, self.epoch, intake, spelling, tickets)
        self._lookaside = LookasidePort(config, service)
        return await self._lookaside.start()

    def _open_transfers(self, engine: Engine) -> None:
        """Both ends: prompts come from prefill workers, running sequences come from and go to decode workers."""
        self._receiver = GroupReceiver(
            engine,
            self.epoch,
            self._config.transfer,
            on_arrival=lambda key, first, count: self._loop.post(lambda: self._on_arrival(key, first, count)),
            on_failure=lambda key, error: self._loop.post(lambda: self._on_stalled(key, error)),
        )
        self._sender = GroupSender(
            engine,
            self.epoch,
            self._config.transfer,
            on_done=lambda key: self._loop.post(lambda: self._on_sent(key)),
            on_failure=lambda key, error: self._loop.post(lambda: self._on_send_failure(key, error)),
        )

    # Each transfer is a prompt's or a sequence's, or brings cached pages: whoever does not know a key ignores it.

    def _on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        self.worker.on_arrival(key, first_index, num_pages)
        self.intake.on_arrival(key, first_index, num_pages)

    def _on_stalled(self, key: TransferKey, error: TransferError) -> None:
        self.worker.on_stalled(key, error)
        self.intake.on_lost(key, error)

    def _on_quiesced(self, key: TransferKey) -> None:
        self.worker.on_quiesced(key)
        self.intake.on_quiesced(key)

    def _on_sent(self, key: TransferKey) -> None:
        self.departures.on_sent(key)
        self.source.on_sent(key)

    def _on_send_failure(self, key: TransferKey, error: TransferError) -> None:
        self.departures.on_failed(key, error)
        self.source.on_failure(key, error)

    def _hand_over_pages(self, engine: Engine) -> HandoverService:
        """Cached pages to and from other workers."""
        config, post = self._config, self._loop.post
        self.source = PageSource(engine, self._sender)
        self.intake = PageIntake(engine, lambda: self._receiver, config.transfer.timeout_s, post)
        client = HandoverClient(self.source, post, self._channels, WorkerId(config.worker_id), self.epoch)
        return HandoverService(client, self.intake, post, self._fences, self.epoch, lambda: self.address)

    def _join_peers(self, engine: Engine, transfers: Transfers) -> AdoptService:
        """What moves sequences between this worker and other decode workers."""
        config, worker = self._config, self.worker
        self.departures = Departures(engine, worker, self._sender, self.epoch, config.transfer)
        self._adopt_calls = AdoptClient(
            self._loop, self.departures, self._channels, WorkerId(config.worker_id), engine.num_ranks
        )
        self.departures.calls = self._adopt_calls
        self.adoptions = Adoptions(worker, transfers, LEASE_S)
        return AdoptService(
            self.departures,
            self.adoptions,
            self._receiver,
            self._loop,
            self._fences,
            self.epoch,
            lambda: self.address,
        )

    def _step(self) -> bool:
        self._driver.turn()
        self._service.notify()
        return False

    def _sweep(self, now_s: float) -> float | None:
        """Looks after every lease of this worker's; when to come again."""
        owners = (self.worker, self.adoptions, self.departures, self.intake)
        return earliest(*(owner.sweep(now_s) for owner in owners))

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
        """Until there is no request, and no page is held or fenced; False when time is up."""
        return await self._service.wait_idle(timeout_s)

    async def stop(self) -> None:
        """Ends every request, then closes what carries them."""
        await self._grpc.set_serving(False)
        if self._lookaside is not None:
            await self._lookaside.stop()
        self._service.close()
        await self._grpc.stop()
        await self._fences.close()
        await self._calls.close()
        await self._adopt_calls.stop()
        await self._channels.close()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._driver.stop)
        await asyncio.to_thread(self._sender.shutdown)
        await asyncio.to_thread(self._receiver.shutdown)
