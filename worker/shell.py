"""The process shell of workers of either role: engine, transfers, step loop, page hand-over and gRPC server.

A server (`prefill_worker.server`, `decode_worker.server`) loads a replica into a shell, opens its transfers, builds the
role's core over them and attaches it; from then on the shell turns outside events into calls on the step loop. The
shell owns these parts and knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc.aio

from engine.engine import Engine
from engine.parallel.leader import Launch
from engine.replica import Replica
from engine.step.loop import StepLoop
from engine.step.sequence import Sequence
from kv_transfer.endpoints import KvReceiver, KvSender, open_receiver, open_sender
from kv_transfer.ranks.rank_main import launch_ranks
from kv_transfer.session.lease import earliest
from penstock import wire
from penstock.config import WorkerConfig
from penstock.config.kv_store import KvStoreConfig
from penstock.errors import ConfigError, PenstockError
from penstock.kv.weights_version import weights_version
from penstock.metrics.worker_metrics import (
    BYTES_SENT,
    OLDEST_FENCE_SECONDS,
    PAGES_SENT,
    TRANSFER_FAILURES,
    TRANSPORT_FALLBACKS,
    WEIGHTS_VERSION,
)
from penstock.rpc.secret import STORE_OBJECTS
from penstock.rpc.server import GrpcServer
from penstock.rpc.trust import Trust
from penstock.types import Epoch, Labels, Role, TransferKey, WorkerId, WorkerLoad, new_epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.channels import Channels
from worker.checkup import check_up, device_name
from worker.fence_monitor import FenceMonitor
from worker.handover.client import HandoverClient
from worker.handover.intake import PageIntake
from worker.handover.service import HandoverService
from worker.handover.source import PageSource
from worker.hints.hint_follower import HintFollower
from worker.kv_publisher.publisher import KvPublisher
from worker.kv_publisher.scopes import SharedScope
from worker.metrics.collector import WorkerCollector
from worker.metrics.model_work import find_work
from worker.metrics.page_use import measure_pages
from worker.metrics.port import MetricsPort
from worker.metrics.step_metrics import SpeculationMetrics, StepMetrics
from worker.pull.client import PullClient
from worker.pull.kept.kept_pages import KeptPages
from worker.pull.prompts import PrefixPulls
from worker.pull.store.backends.opening import open_store
from worker.pull.store.shared_pages import SharedPages
from worker.service import WorkerService
from worker.start_progress import StartReporter, load_replica
from worker.ticket_log import TicketLog


class OutgoingTransfers(Protocol):
    """The role's transfers out of this pool. Called on the step loop."""

    def on_sent(self, key: TransferKey) -> None: ...

    def on_failed(self, key: TransferKey, error: PenstockError) -> None: ...


class IncomingTransfers(Protocol):
    """The role's transfers into this pool. Called on the step loop."""

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None: ...

    def on_lost(self, key: TransferKey, error: PenstockError) -> None: ...

    def on_quiesced(self, key: TransferKey) -> None: ...


@dataclass(frozen=True, slots=True)
class RoleCore:
    """The role's contribution to its shell."""

    step: Callable[[], bool]  # runs on the step loop; returns whether it did any work
    sweep: Callable[[float], float | None]  # runs on the step loop; checks leases, returns the next time
    load: Callable[[], WorkerLoad]  # may be called from any thread
    sequences: Callable[[], Collection[Sequence]]  # of open requests; may be called from any thread
    is_transfer_open: Callable[[TransferKey], bool]  # for transfers unknown to the sender; called from any thread
    outgoing: OutgoingTransfers
    incoming: IncomingTransfers | None  # None: only handed-over pages are written into this pool


class WorkerShell:
    """Owns the parts that both roles share. Attributes without a default exist after `load` and `attach`."""

    replica: Replica | None
    trust: Trust
    description: worker_pb2.WorkerDescription
    sender: KvSender
    source: PageSource
    intake: PageIntake
    pulls: PrefixPulls
    hints: HintFollower
    channels: Channels
    fences: FenceMonitor
    service: WorkerService
    handover: HandoverService
    rpc: GrpcServer

    def __init__(
        self, config: WorkerConfig, role: Role, replica: Replica | None = None, launch: Launch | None = None
    ) -> None:
        """`replica` is already loaded and not in use; `launch` starts the processes of other ranks, by default as plain
        processes. Raises ConfigError if the configuration is for the other role.
        """
        if config.role is not role:
            raise ConfigError(f"role = {config.role.value}: this is a {role.value} worker; set role = {role.value!r}")
        self.config = config
        self.epoch = new_epoch()
        self.address = ""
        self.replica = replica
        self.tickets = TicketLog()
        self._launch = launch or launch_ranks
        self._running = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._running.create_future()
        self.loop = StepLoop(config.worker_id, self._step, self._on_fatal, self._sweep)
        self._core: RoleCore
        self._fenced_s: float | None = None  # time of the oldest fence, monotonic
        self._receiver: KvReceiver | None = None
        self._metrics: MetricsPort | None = None
        self.publisher: KvPublisher | None = None
        self._kept: KeptPages | None = None
        self._shared: SharedPages | None = None
        self._opening_receiver = threading.Lock()

    async def load(self, progress: StartReporter) -> Engine:
        """Loads the replica unless one was given. Raises CheckpointError or ConfigError."""
        config = self.config
        self.trust = Trust(config.security)
        self.channels = Channels(self.trust.channel)
        self._watching = asyncio.create_task(self.trust.watcher.follow(), name="key files")
        if self.replica is None:
            self.replica = await asyncio.to_thread(load_replica, config, progress, self._launch)
        self.description = describe(self.replica.engine, config, self.epoch)
        self.step_metrics = StepMetrics(self.description)
        self.speculation_metrics = SpeculationMetrics(self.description)
        return self.replica.engine

    async def open_transfers(self) -> None:
        """Opens the sender and the parts that copy cached pages; the receiver is opened on its first use."""
        config, post, engine = self.config, self.loop.post, self._engine
        self.sender = await asyncio.to_thread(
            open_sender,
            engine,
            self.epoch,
            config.transfer,
            on_done=lambda key: self._post_outgoing(key, lambda owner: owner.on_sent(key)),
            on_failure=lambda key, error: self._post_outgoing(key, lambda owner: owner.on_failed(key, error)),
        )
        self.source = PageSource(engine, self.sender)
        self.intake = PageIntake(engine, self.open_receiver, config.transfer.timeout_s, post)
        self._pull_client = PullClient(post, self.channels, WorkerId(config.worker_id), self.epoch)
        if config.keeper is not None:
            self._kept = KeptPages(engine, config.keeper, config.worker_id, post)
        if config.kv_store is not None:
            self._shared = await asyncio.to_thread(self._open_store, config.kv_store)
        self.pulls = PrefixPulls(
            engine,
            self._pull_client.start,
            lambda: self._core.load().prefill_steps,
            config.transfer,
            recall=lambda sequence: self._kept.recall(sequence) if self._kept is not None else None,
            store=self._shared,
        )
        on_end = self._shared.on_end if self._shared is not None else lambda sequence: None
        self.hints = HintFollower(WorkerId(config.worker_id), engine, on_end=on_end)
        self.fences = FenceMonitor(
            self.channels.use, lambda key: post(partial(self._on_quiesced, key)), self.open_receiver
        )

    def _open_store(self, config: KvStoreConfig) -> SharedPages:
        """Opens the shared store. Blocks. Raises ConfigError."""
        owner = f"{self.config.worker_id}/{self.epoch}"
        return SharedPages(self._engine, config, open_store(config), self._store_key, owner, self.loop.post)

    def _store_key(self) -> bytes:
        """Returns the key of this deployment's objects in a shared store; nothing without a cluster secret."""
        return self.trust.secrets.current.key(STORE_OBJECTS) if self.trust.secrets is not None else b""

    def open_receiver(self) -> KvReceiver:
        """Returns the receiver, which the first call opens. Blocks, so it must not be called on the step loop."""
        post = self.loop.post_beside  # only prefill workers compute beside the loop, and they get no prompts' pages
        with self._opening_receiver:
            if self._receiver is None:
                self._receiver = open_receiver(
                    self._engine,
                    self.epoch,
                    self.config.transfer,
                    on_arrival=lambda *event: post(partial(self._on_arrival, *event)),
                    on_failure=lambda key, error: post(lambda: self._owner_of_incoming(key).on_lost(key, error)),
                )
            return self._receiver

    def attach(self, core: RoleCore, service: str, add_services: Iterable[Callable[[grpc.aio.Server], None]]) -> None:
        """Connects the role's core to the step loop, and adds its `service` to those that every worker has."""
        assert self.replica is not None
        self._core = core
        if self._shared is not None:
            self.description.store.CopyFrom(self._shared.describe())
        self.service = WorkerService(
            self.description,
            self.replica.events,
            self._load,
            lambda key: core.is_transfer_open(key) or self.sender.is_open(key),
            partial(check_up, self._engine, self.config.engine),
            self.tickets,
            self.fences.on_gone,
            self._shared.announcer if self._shared is not None else None,
        )
        if self.config.kv_publisher is not None:
            scope = SharedScope(self.description.model_revision, lambda: self.trust.secrets)
            self.publisher = KvPublisher(
                self.replica.events, self.config.kv_publisher, self.description.page_size, scope.extra_key
            )
        names = worker_pb2.DESCRIPTOR.services_by_name
        self.rpc = self.trust.server([names["Worker"], names[service], names["PageHandover"]])
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.rpc.server)
        self.handover = self._handover_service()
        worker_pb2_grpc.add_PageHandoverServicer_to_server(self.handover, self.rpc.server)
        for add in add_services:
            add(self.rpc.server)

    def _handover_service(self) -> HandoverService:
        post = self.loop.post_beside  # pages are handed over and pulled while a step computes
        client = HandoverClient(self.source, post, self.channels, WorkerId(self.config.worker_id), self.epoch)
        max_pulls = self.config.transfer.max_pulls if self.description.pulls else 0
        return HandoverService(client, self.intake, post, self.fences, self.epoch, lambda: self.address, max_pulls)

    async def serve(self) -> None:
        """Starts the step loop and listens. Raises ConfigError if a port is taken."""
        config = self.config
        if config.metrics_port is not None:
            work = find_work(config.engine, self._engine.num_ranks)
            collector = WorkerCollector(
                self.description,
                self._load,
                work,
                device_name(self._engine),
                config.price_per_hour,
                lambda: measure_pages(self._engine.pool, self._core.sequences(), self.description.page_size),
                self.hints.held_by_tenant,
            )
            self._metrics = MetricsPort(
                config.host,
                config.metrics_port,
                collector,
                self.step_metrics.registry,
                self.speculation_metrics.registry,
                last_port=config.last_metrics_port,
            )
            self.description.metrics_address = f"{config.host}:{self._metrics.port}"
        if self.publisher is not None:
            self.publisher.start()
        if self._kept is not None:
            await asyncio.to_thread(self._kept.start)
        if self._shared is not None:
            self._shared.start()
        self.loop.start()
        self._engine.when_lost(self._on_fatal)
        port = await self.rpc.start(self.config.host, self.config.port)
        self.address = f"{self.config.host}:{port}"
        await self.rpc.set_serving(True)

    @property
    def _engine(self) -> Engine:
        assert self.replica is not None
        return self.replica.engine

    # The step loop. A transfer belongs to the page hand-over if its key is known there, otherwise to the role's core.

    def _step(self) -> bool:
        worked = self._core.step()
        self.service.notify()
        if self.publisher is not None:
            self.publisher.notify()
        return worked

    def _load(self) -> WorkerLoad:
        """Returns the load, including the current age of fences. May be called on any thread."""
        load, fenced_s = self._core.load(), self._fenced_s
        age_s = 0.0 if fenced_s is None else time.monotonic() - fenced_s
        stats = self.sender.stats
        own = {
            OLDEST_FENCE_SECONDS.name: age_s,
            WEIGHTS_VERSION.name: float(weights_version(self.description.model_revision)),
            PAGES_SENT.name: float(stats.num_pages),
            BYTES_SENT.name: float(stats.num_bytes),
            TRANSFER_FAILURES.name: float(stats.num_failures),
            TRANSPORT_FALLBACKS.name: float(stats.num_fallbacks),
        }
        own |= self.hints.values()
        kept = {} if self._kept is None else self._kept.values()
        shared = {} if self._shared is None else self._shared.values()
        published = {} if self.publisher is None else self.publisher.metrics
        pulled = self.pulls.metrics.values()
        return replace(load, metrics={**load.metrics, **own, **pulled, **published, **kept, **shared})

    def _sweep(self, now_s: float) -> float | None:
        self._fenced_s = self._engine.pool.oldest_fence_s
        return earliest(
            self._core.sweep(now_s),
            self.intake.sweep(now_s),
            self.hints.sweep(now_s),
            self.pulls.sweep(now_s),
            None if self._kept is None else self._kept.sweep(now_s),
            None if self._shared is None else self._shared.sweep(now_s),
        )

    def _post_outgoing(self, key: TransferKey, report: Callable[[OutgoingTransfers], None]) -> None:
        """Reports to the owner of a transfer on the step loop; the role's core hears of it only between steps."""

        def run() -> None:
            if self.source.owns(key):
                report(self.source)
            else:
                self.loop.post(lambda: report(self._core.outgoing))

        self.loop.post_beside(run)

    def _owner_of_incoming(self, key: TransferKey) -> IncomingTransfers:
        return self.intake if self._core.incoming is None or self.intake.owns(key) else self._core.incoming

    def _on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        self._owner_of_incoming(key).on_arrival(key, first_index, num_pages)

    def _on_quiesced(self, key: TransferKey) -> None:
        self._owner_of_incoming(key).on_quiesced(key)

    def _on_fatal(self, error: BaseException) -> None:
        def fail() -> None:
            if not self.failed.done():
                self.failed.set_exception(error)

        self._running.call_soon_threadsafe(fail)

    # The end. A server calls `close_port`, ends its calls to other workers, and then stops the loop.

    async def leave(self) -> None:
        """Asks routers to send no more requests; those already here continue."""
        self.service.leave()
        await self.rpc.set_serving(False)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open and no page is held or fenced. Returns False after `timeout_s`."""
        return await self.service.wait_idle(timeout_s)

    async def close_port(self) -> None:
        """Ends every request while the step loop still runs. Closes the port only once this worker writes into no other
        pool, since receivers take a refused connection as permission to reuse their pages.
        """
        await self.rpc.set_serving(False)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        self.service.close()
        await asyncio.to_thread(self.sender.shutdown)
        await self.rpc.stop()
        await self.fences.close()

    async def close_channels(self) -> None:
        """Closes the channels to other workers and stops watching key files."""
        self._watching.cancel()
        await self._pull_client.close()
        await self.channels.close()

    async def stop_loop(self) -> None:
        if self._shared is not None:
            await asyncio.to_thread(self._shared.close)
        await asyncio.to_thread(self.loop.stop)
        if self._kept is not None:
            await asyncio.to_thread(self._kept.close)
        if self.publisher is not None:
            await asyncio.to_thread(self.publisher.close)

    async def stop_receiver(self) -> None:
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.shutdown)


def describe(engine: Engine, config: WorkerConfig, epoch: Epoch) -> worker_pb2.WorkerDescription:
    """Returns the worker's description for routers and for workers that it exchanges pages with."""
    context_length = _context_that_fits(engine, config)
    labels = Labels(config.labels.host or platform.node(), config.labels.rack, config.labels.zone)
    return worker_pb2.WorkerDescription(
        worker_id=config.worker_id,
        epoch=epoch,
        role=config.role.value,
        model=config.served_model or Path(config.engine.model).name,
        model_revision=engine.layout.model_revision,
        page_size=engine.layout.page_size,
        num_pages=engine.pool.num_pages,
        layout_digest=engine.model_layout.digest(),
        context_length=min(context_length, config.engine.max_context or context_length),
        page_bytes=engine.model_layout.page_bytes,
        kv_digest=engine.model_layout.kv_digest(),
        num_ranks=engine.num_ranks,
        pulls=config.engine.prefix_caching and config.transfer.pull and engine.pool.parts is None,
        silent_cache=config.engine.prefix_caching and not config.engine.kv_events,
        labels=wire.labels_to_wire(labels),
        adapter_slots=config.engine.max_adapters,
        max_held_tokens=_max_held_tokens(engine, config),
    )


def _step_tokens(engine: Engine, config: WorkerConfig) -> int:
    """Returns how many tokens of one prompt may be in computation while earlier ones keep their pages."""
    if config.role is Role.PREFILL:
        return 2 * (config.prefill.max_batch_tokens or engine.saturating_tokens)  # a step may run ahead
    return config.decode.max_batch_tokens


def _context_that_fits(engine: Engine, config: WorkerConfig) -> int:
    """Returns how many tokens a sequence may have: it must fit into the pool by itself, or it could never finish."""
    context_length, num_pages = engine.model.context_length, engine.pool.num_pages
    _check_slots(engine, config)
    if engine.prefix_cache.window.max_pages(context_length, _step_tokens(engine, config)) <= num_pages:
        return context_length
    return min(context_length, num_pages * engine.layout.page_size)


def _check_slots(engine: Engine, config: WorkerConfig) -> None:
    """Raises ConfigError if too few pages can have a windowed part for one sequence to make progress."""
    parts, context_length = engine.pool.parts, engine.max_context
    if parts is None:
        return
    needed = min(parts.window.max_pages(context_length, _step_tokens(engine, config)), engine.pool.num_pages)
    if parts.num_slots < needed:
        raise ConfigError(
            f"engine.window_share = {config.engine.window_share:g}: {parts.num_slots} of {engine.pool.num_pages} pages "
            f"have room for windowed layers, but a step of one prompt needs {needed}; give a larger share, more pages, "
            f"or a smaller {config.role.value}.max_batch_tokens"
        )


def _max_held_tokens(engine: Engine, config: WorkerConfig) -> int:
    window = engine.prefix_cache.window
    if window.tokens is None:
        return 0
    return window.max_pages(engine.model.context_length, _step_tokens(engine, config)) * engine.layout.page_size
