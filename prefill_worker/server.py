"""Composes a prefill worker for a process: the prefill core in a worker shell, started and stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from engine.adapters.queue import AdapterQueue
from engine.parallel.leader import Launch
from engine.replica import Replica
from engine.sampling.grammar.queue import GrammarQueue
from engine.step.isolation import IsolatedOutput
from engine.step.job_thread import JobThread
from kv_transfer.session.lease import earliest
from penstock.config import WorkerConfig
from penstock.errors import PenstockError
from penstock.types import Epoch, Role
from penstock.v1.worker_pb2_grpc import add_PrefillWorkerServicer_to_server
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker
from worker.shell import RoleCore, WorkerShell
from worker.start_progress import StartReporter


class PrefillServer:
    """Serves once `start` has returned. `failed` completes with the error of a step loop that died."""

    role = Role.PREFILL
    worker: PrefillWorker  # set by `start`
    _steps: JobThread | None = None  # on a CPU

    def __init__(self, config: WorkerConfig, replica: Replica | None = None, launch: Launch | None = None) -> None:
        """Takes the arguments of `WorkerShell`."""
        self.shell = WorkerShell(config, self.role, replica, launch)
        self.failed: asyncio.Future[None] = self.shell.failed
        self.epoch: Epoch = self.shell.epoch

    @property
    def address(self) -> str:
        return self.shell.address

    @property
    def replica(self) -> Replica | None:
        return self.shell.replica

    async def start(self, progress: StartReporter | None = None) -> None:
        """Loads the model and starts to serve. Raises CheckpointError or ConfigError."""
        shell = self.shell
        config, engine = shell.config, await shell.load(progress or StartReporter())
        await shell.open_transfers()
        shell.description.transports.extend(shell.sender.transports)
        shell.description.chunk_tokens = config.prefill.max_batch_tokens or engine.saturating_tokens
        self._grammars = GrammarQueue(engine.grammars, engine.model.eos_token_ids, shell.loop.post)
        adapters = self._adapters = AdapterQueue(engine.adapters, shell.loop.post)
        context_length = shell.description.context_length
        if not engine.kv_pages.is_cuda:
            self._steps = JobThread(f"{config.worker_id} steps")
        worker = self.worker = PrefillWorker(
            engine,
            shell.sender,
            config,
            context_length,
            grammars=self._grammars,
            pulls=shell.pulls,
            adapters=adapters,
            on_step=shell.step_metrics.observe,
            hints=shell.hints,
            run=self._run,
        )
        service = self._service = PrefillService(worker, shell.loop)
        core = RoleCore(
            step=worker.step,
            sweep=lambda now_s: earliest(worker.sweep(now_s), adapters.sweep(now_s)),
            load=lambda: worker.load,
            sequences=lambda: worker.sequences,
            is_transfer_open=worker.is_open,
            outgoing=worker,
            incoming=None,
        )
        shell.attach(core, "PrefillWorker", [partial(add_PrefillWorkerServicer_to_server, service)])
        await shell.serve()

    def _run(self, compute: Callable[[], IsolatedOutput]) -> IsolatedOutput:
        """Computes a step. On a CPU another thread does, so that pages are pulled and handed over meanwhile; a GPU
        computes beside the step loop anyway.
        """
        return compute() if self._steps is None else self.shell.loop.run_beside(self._steps.post, compute)

    async def leave(self) -> None:
        """Asks routers to send no more requests; running prefills continue."""
        await self.shell.leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no job is open and no page is held. Returns False after `timeout_s`."""
        return await self.shell.wait_idle(timeout_s)

    async def pause(self, running: PenstockError | None, wait_s: float, left: PenstockError) -> None:
        """Takes no more requests, and lets prefills end for `wait_s` unless they must end with `running`, which `stop`
        does: decode workers then compute these prompts."""
        await self.shell.leave()
        if running is None:
            await self.shell.wait_idle(wait_s)

    async def stop(self) -> None:
        """Ends every prefill while the step loop still runs, then closes the other parts."""
        shell = self.shell
        self._service.close()
        await shell.close_port()
        await shell.close_channels()
        await shell.stop_loop()
        self._grammars.close()
        self._adapters.close()
        if self._steps is not None:
            self._steps.close()
        await shell.stop_receiver()
