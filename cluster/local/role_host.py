"""Hosts one engine and one role at a time: a prefill or a decode worker that can become the other over the same engine.

Weights and cached pages stay where they are; the pages' events continue under the new epoch. The two roles do not know
each other; this module combines them. A Ray actor or a plain process (`python -m cluster.local.worker`) holds one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from cluster.pools.weight_change import ApplyWeights, DiscardWeights, PrepareWeights, ReceiveWeights, WeightChange
from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast
from penstock.config import LoadedWeightsConfig, WorkerConfig
from penstock.errors import InvalidInput, PenstockError, Unavailable, WeightsReplaced, WorkerPaused
from penstock.types import Epoch, PauseMode, Role, WorkerId
from worker.start_progress import StartReporter, load_replica, report_build

if TYPE_CHECKING:
    from decode_worker.server import DecodeServer
    from engine.engine import Engine
    from engine.parallel.leader import Launch
    from engine.replica import Replica
    from prefill_worker.server import PrefillServer

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 5.0  # the last transfers of a drained worker take far less
_NO_EPOCH = Epoch(0)


class RoleHost:
    """A worker server whose role, and whose weights, can change. After a failed change only `stop` may be called."""

    def __init__(self, config: WorkerConfig, *, is_spare: bool = False, launch: Launch | None = None) -> None:
        """A spare loads what `config` names, and serves only once `flip` has given it a name and a role. `launch`
        starts the processes of the other ranks; by default they are plain processes.
        """
        self._config = config
        self._launch = launch
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replica: Replica | None = None
        self._warming = threading.Thread(target=_warm_up_transport, args=(config,), name="warm up", daemon=True)
        self._warming.start()
        self._serving: PrefillServer | DecodeServer | None = None if is_spare else self._make(config, None)
        self._prepared: LoadedWeightsConfig | None = None
        self._changing_weights = asyncio.Lock()

    def _make(self, config: WorkerConfig, replica: Replica | None) -> PrefillServer | DecodeServer:
        # Imported here, because only a worker's process may load torch, after its thread limits are set.
        server: PrefillServer | DecodeServer
        if config.role is Role.PREFILL:
            from prefill_worker.server import PrefillServer

            server = PrefillServer(config, replica, self._launch)
        else:
            from decode_worker.server import DecodeServer

            server = DecodeServer(config, replica, self._launch)
        server.failed.add_done_callback(self._on_failed)
        return server

    def _on_failed(self, failed: asyncio.Future[None]) -> None:
        error = None if failed.cancelled() else failed.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    @property
    def worker_id(self) -> str:
        return self._config.worker_id

    @property
    def role(self) -> Role:
        return self._config.role

    @property
    def epoch(self) -> Epoch:
        return self._serving.epoch if self._serving is not None else _NO_EPOCH

    @property
    def address(self) -> str:
        return self._serving.address if self._serving is not None else ""

    @property
    def server(self) -> PrefillServer | DecodeServer:
        assert self._serving is not None, "a spare has no server"
        return self._serving

    async def start(self, stages: StartReporter | None = None) -> None:
        """Loads the model and serves, unless this is a spare; reports progress to `stages`. Raises CheckpointError or
        ConfigError."""
        stages = stages or StartReporter()
        if self._warming.is_alive():  # it may be compiling kernels
            await asyncio.to_thread(report_build, stages)
        await asyncio.to_thread(self._warming.join)
        if self._serving is not None:
            await self._serving.start(stages)
            return
        from kv_transfer.ranks.rank_main import launch_ranks

        self._make(self._config, None)  # imports the code that it will serve with
        launch = self._launch or launch_ranks
        self._replica = await asyncio.to_thread(load_replica, self._config, stages, launch)
        if self._config.role is Role.DECODE:  # a decode server would start with this
            largest = self._config.decode.max_batch_sequences
            await asyncio.to_thread(self._replica.engine.capture_graphs, stages.on_graphs, largest)
        loop = asyncio.get_running_loop()

        def on_lost(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        self._replica.engine.when_lost(on_lost)  # for a spare; the server of a serving worker is notified too

    async def flip(self, worker_id: WorkerId, role: Role) -> None:
        """Changes the role, or gives a spare its first role, under this name and a new epoch.

        The worker must have been drained, as requests that are left are aborted. Raises InvalidInput if it has this
        role already, and Unavailable if a peer may still write into its pages, which are then unusable.
        """
        before, replica = self.worker_id, self._replica
        if self._serving is not None:
            if role is self.role:
                raise InvalidInput("role", f"is {role.value}, which {before} has already; give the other one")
            await self._serving.wait_idle(IDLE_TIMEOUT_S)
            await self._serving.stop()
            replica = self._serving.replica
        assert replica is not None, "start first"
        if num_pinned := replica.num_pinned_pages:
            raise Unavailable(f"{before} cannot change its role: {num_pinned} of its pages may still be written")
        self._config = self._config.model_copy(update={"role": role, "worker_id": worker_id})
        self._serving = self._make(self._config, replica)
        await self._serving.start()
        log.info("%s is %s, epoch %d", before, worker_id, self.epoch)

    # Weights.

    @property
    def weights_version(self) -> int:
        """The version of the weights in force; 0: the checkpoint's own."""
        return self._config.engine.weights_version

    async def receive_weights(self, broadcast: WeightsBroadcast, member: BroadcastMember) -> None:
        """Receives weights that a trainer broadcasts, for `prepare_weights` to read, while those in force serve.

        Raises InvalidInput or CheckpointError where they do not fit the model, and Unavailable if the trainer or
        another member is lost.
        """
        self._prepared = None
        await asyncio.to_thread(self._engine.receive_weights, broadcast, member)

    async def prepare_weights(self, weights: LoadedWeightsConfig) -> None:
        """Reads and checks weights, in place of any that were prepared before, while those in force serve.

        Raises CheckpointError where they do not fit the model or its MTP layer that drafts, and InvalidInput for a
        version that is not newer.
        """
        held = self._config.engine.weights_version
        if weights.version <= held:
            raise InvalidInput("version", f"is {weights.version}, and {self.worker_id} has {held}; give a higher one")
        from decode_worker.drafting.load_draft import check_draft_update

        self._prepared = None
        await asyncio.to_thread(check_draft_update, self._config.decode.draft_model, self._engine, weights)
        await asyncio.to_thread(self._engine.prepare_weights, weights)
        self._prepared = weights

    async def discard_weights(self) -> None:
        """Frees what was received or prepared."""
        self._prepared = None
        await asyncio.to_thread(self._engine.discard_weights)

    async def apply_weights(self, mode: PauseMode, timeout_s: float) -> None:
        """Pauses, puts the prepared weights in force, and serves in the same role under a new epoch.

        Raises InvalidInput if none are prepared, and Unavailable if a peer may still write into the pages, which are
        then unusable.
        """
        weights, self._prepared = self._prepared, None
        if weights is None:
            raise InvalidInput("weights", "are not prepared; call PrepareWeights first")
        replica = self._replica
        if self._serving is not None:
            await self._serving.pause(*_pause_errors(self.worker_id, weights, mode, timeout_s))
            await self._serving.wait_idle(IDLE_TIMEOUT_S)
            await self._serving.stop()
            replica = self._serving.replica
        assert replica is not None, "start first"
        if num_pinned := replica.num_pinned_pages:
            raise Unavailable(f"{self.worker_id} cannot change its weights: {num_pinned} pages may still be written")
        await asyncio.to_thread(replica.engine.apply_weights)
        engine = self._config.engine.model_copy(update={"weights": weights})
        self._config = self._config.model_copy(update={"engine": engine})
        if self._serving is not None:
            self._serving = self._make(self._config, replica)
            await self._serving.start()
        log.info("%s has weights %d, epoch %d", self.worker_id, weights.version, self.epoch)

    async def change_weights(self, change: WeightChange) -> None:
        """Makes one of the changes above, after those that were asked for before."""
        async with self._changing_weights:
            match change:
                case ReceiveWeights(broadcast, member):
                    await self.receive_weights(broadcast, member)
                case PrepareWeights(weights):
                    await self.prepare_weights(weights)
                case ApplyWeights(mode, timeout_s):
                    await self.apply_weights(mode, timeout_s)
                case DiscardWeights():
                    await self.discard_weights()

    @property
    def _engine(self) -> Engine:
        replica = self._serving.replica if self._serving is not None else self._replica
        assert replica is not None, "start first"
        return replica.engine

    async def leave(self) -> None:
        if self._serving is not None:
            await self._serving.leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        return self._serving is None or await self._serving.wait_idle(timeout_s)

    async def stop(self) -> None:
        if self._serving is not None:
            await self._serving.stop()
        elif self._replica is not None:
            await asyncio.to_thread(self._replica.engine.close)


def _pause_errors(
    worker_id: str, weights: LoadedWeightsConfig, mode: PauseMode, timeout_s: float
) -> tuple[PenstockError | None, float, PenstockError]:
    """Returns the arguments of the servers' `pause`."""
    cause = f"{worker_id} replaces its weights by version {weights.version}"
    late = WeightsReplaced(f"{cause}, and the request did not end within {timeout_s:g} s; send it again")
    match mode:
        case PauseMode.WAIT:
            return None, timeout_s, late
        case PauseMode.ABORT:
            return WeightsReplaced(f"{cause} in mode abort; send the request again"), 0.0, late
        case PauseMode.KEEP:
            return WorkerPaused(f"{cause}; the request continues with them"), 0.0, late


def _warm_up_transport(config: WorkerConfig) -> None:
    from kv_transfer.transports.nixl_agent import NixlAgent

    NixlAgent.warm_up(config.transfer)
