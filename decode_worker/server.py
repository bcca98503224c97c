"""Composes a decode worker for a process: the decode core in a worker shell, with its calls to other workers.

`start` composes these parts and `stop` closes them; neither decides anything about a request.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from decode_worker.delivery.lookaside import LookasidePort, LookasideService, check_lookaside, load_spelling
from decode_worker.drafting.load_draft import Draft, load_draft
from decode_worker.events import DecodeEvents
from decode_worker.migrate.client import MigrationClient
from decode_worker.migrate.incoming import LEASE_S, IncomingMigrations
from decode_worker.migrate.outgoing import OutgoingMigrations
from decode_worker.migrate.service import MigrationService
from decode_worker.prefill.client import PrefillClient
from decode_worker.prefill.placement_policy import describe_limits
from decode_worker.prefill.transfer_table import TransferTable
from decode_worker.request import DecodeRequest
from decode_worker.request_intake import RequestIntake
from decode_worker.schedule.step_driver import StepDriver
from decode_worker.service import DecodeService, add_to_server
from decode_worker.worker import DecodeWorker
from engine.adapters.queue import AdapterQueue
from engine.engine import Engine
from engine.parallel.leader import Launch
from engine.replica import Replica
from engine.sampling.grammar.queue import GrammarQueue
from kv_transfer.endpoints import KvReceiver
from kv_transfer.session.lease import earliest
from penstock.config import WorkerConfig
from penstock.errors import PenstockError, WorkerPaused
from penstock.types import Epoch, Role, WorkerId
from worker.shell import RoleCore, WorkerShell
from worker.start_progress import StartReporter

PAUSE_TIMEOUT_S = 5.0  # for requests to be released, and for transfers in flight to end


class DecodeServer:
    """Serves once `start` has returned. `failed` completes with the error of a step loop that died."""

    role = Role.DECODE
    worker: DecodeWorker  # this and the following are set by `start`
    outgoing: OutgoingMigrations
    incoming: IncomingMigrations
    _prefill_calls: PrefillClient
    _migration_calls: MigrationClient
    _driver: StepDriver
    _grammars: GrammarQueue
    _adapters: AdapterQueue
    _service: DecodeService

    def __init__(self, config: WorkerConfig, replica: Replica | None = None, launch: Launch | None = None) -> None:
        """Takes the arguments of `WorkerShell`."""
        self.shell = WorkerShell(config, self.role, replica, launch)
        self.failed: asyncio.Future[None] = self.shell.failed
        self.epoch: Epoch = self.shell.epoch
        self._worker_id = WorkerId(config.worker_id)
        self._lookaside: LookasidePort | None = None
        self._draft: Draft | None = None

    @property
    def address(self) -> str:
        return self.shell.address

    @property
    def replica(self) -> Replica | None:
        return self.shell.replica

    async def start(self, progress: StartReporter | None = None) -> None:
        """Loads the model and starts to serve. Raises CheckpointError or ConfigError."""
        shell, config = self.shell, self.shell.config
        if config.lookaside is not None:
            check_lookaside(config)  # raises before weights are loaded for nothing
        engine = await self._load(progress or StartReporter())
        await shell.open_transfers()
        receiver = await asyncio.to_thread(shell.open_receiver)
        shell.description.transports.extend(receiver.transports)
        describe_limits(shell.description, config.decode)

        self._prefill_calls = PrefillClient(
            shell.loop, receiver.offer, shell.channels, shell.fences, receiver.window_slots
        )
        transfers = TransferTable(engine, receiver, self._prefill_calls, self.epoch, config.transfer, shell.loop.post)
        self.worker = self._make_worker(engine, transfers)
        prompt_stream = None
        if config.decode.prompt_sm_share:
            prompt_stream = await asyncio.to_thread(engine.open_prompt_stream, config.decode.prompt_sm_share)
        self._driver = StepDriver(self.worker, engine, config.worker_id, shell.loop.post, prompt_stream)
        migrations = self._make_migrations(engine, transfers, receiver)

        intake = RequestIntake(self.worker, self.incoming, shell.loop)
        self._service = DecodeService(intake, migrations)
        shell.attach(self._core(), "DecodeWorker", [partial(add_to_server, self._service)])
        if config.lookaside is not None:
            shell.description.lookaside_address = await self._open_lookaside(intake)
        await shell.serve()

    async def _load(self, progress: StartReporter) -> Engine:
        """Loads the model, its graphs, and the draft model if one is configured."""
        config = self.shell.config
        engine = await self.shell.load(progress)
        if config.decode.draft_model is not None:  # a head changes what graphs compute
            self._draft = await asyncio.to_thread(load_draft, config.decode.draft_model, config.engine, engine)
        await asyncio.to_thread(engine.capture_graphs, progress.on_graphs, config.decode.max_batch_sequences)
        return engine

    def _make_worker(self, engine: Engine, transfers: TransferTable) -> DecodeWorker:
        shell = self.shell
        self._grammars = GrammarQueue(engine.grammars, engine.model.eos_token_ids, shell.loop.post)
        self._adapters = AdapterQueue(engine.adapters, shell.loop.post)
        return DecodeWorker(
            self._worker_id,
            engine,
            transfers,
            shell.config.decode,
            shell.description.context_length,
            self._grammars,
            shell.pulls,
            self._adapters,
            self._draft,
            self._events(),
            shell.hints,
        )

    def _make_migrations(self, engine: Engine, transfers: TransferTable, receiver: KvReceiver) -> MigrationService:
        """Makes both sides of migrations, and their service."""
        shell = self.shell
        calls = self._migration_calls = MigrationClient(shell.loop, shell.channels, self._worker_id, engine.num_ranks)
        self.outgoing = OutgoingMigrations(engine, self.worker, shell.sender, calls, self.epoch, shell.config.transfer)
        self.incoming = IncomingMigrations(self.worker, transfers, LEASE_S)
        return MigrationService(
            self.outgoing, self.incoming, receiver, shell.loop, shell.fences, self.epoch, lambda: self.address
        )

    def _events(self) -> DecodeEvents:
        """Connects the worker to its migrations, which are built over it, and to the metrics."""
        speculates = self.shell.config.decode.speculation != "off"

        def after_step() -> None:
            self.outgoing.advance()
            self.incoming.answer()

        def on_release(request: DecodeRequest) -> None:
            self.outgoing.abandon(request)
            sampling = request.sequence.sampling
            if speculates and sampling.grammar is None and (decoded := request.decoded(time.monotonic())):
                self.shell.speculation_metrics.observe_request(sampling.no_speculation, *decoded)

        return DecodeEvents(
            after_step,
            on_release=on_release,
            on_step=self.shell.step_metrics.observe,
            on_verified=self.shell.speculation_metrics.observe,
        )

    def _core(self) -> RoleCore:
        worker, driver = self.worker, self._driver
        swept = (worker, worker.bulk, self.incoming, self.outgoing, self._adapters)

        def step() -> bool:
            driver.turn()
            return False  # the end of a step is a call to the loop and wakes it

        return RoleCore(
            step=step,
            sweep=lambda now_s: earliest(*(owner.sweep(now_s) for owner in swept)),
            load=lambda: worker.load,
            sequences=lambda: [request.sequence for request in tuple(worker.requests)],
            is_transfer_open=self._migration_calls.is_open,
            outgoing=self.outgoing,
            incoming=worker,
        )

    async def _open_lookaside(self, intake: RequestIntake) -> str:
        """Opens the lookaside port. Returns the address for clients."""
        config, tickets = self.shell.config, self.shell.tickets
        spelling = await asyncio.to_thread(load_spelling, config.engine.model)
        trust = self.shell.trust
        service = LookasideService(lambda: trust.secrets, self._worker_id, self.epoch, intake, spelling, tickets)
        self._lookaside = LookasidePort(config, service, trust)
        return await self._lookaside.start()

    async def leave(self) -> None:
        """Asks routers to send no more requests; those already here continue."""
        await self.shell.leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open and no page is held or fenced. Returns False after `timeout_s`."""
        return await self.shell.wait_idle(timeout_s)

    async def pause(self, running: PenstockError | None, wait_s: float, left: PenstockError) -> None:
        """Takes no more requests, and returns once none is open. `stop` follows.

        Requests that run end with `running`; None lets them run for `wait_s`, after which they end with `left`.
        """
        refusal = WorkerPaused(f"{self._worker_id} pauses while its weights are replaced")
        self.shell.loop.post(lambda: self.worker.refuse_new(refusal))
        await self.shell.leave()
        if running is not None or not await self.shell.wait_idle(wait_s):
            self.shell.loop.post(lambda: self.worker.end_all(running or left))
            await self.shell.wait_idle(PAUSE_TIMEOUT_S)
        self._service.end_streams()  # in order, so that routers read these errors before the streams' ends

    async def stop(self) -> None:
        """Ends every request while the step loop still runs, then closes the other parts."""
        shell = self.shell
        if self._lookaside is not None:
            await self._lookaside.stop()
        await shell.close_port()
        await self._prefill_calls.close()
        await self._migration_calls.stop()
        await shell.close_channels()
        await shell.stop_loop()
        await asyncio.to_thread(self._driver.stop)
        self._grammars.close()
        self._adapters.close()
        if self._draft is not None:
            self._draft.close()
        await shell.stop_receiver()
