"""One engine and one role at a time: a prefill or a decode worker that can become the other over the same engine.

Weights stay where they are and so do cached pages, whose events go on under the new epoch. The two roles never know
each other; they are put together here. Both a Ray actor and a plain process (`python -m cluster.worker`) hold one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config import WorkerConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.types import Epoch, Role, WorkerId

if TYPE_CHECKING:
    from decode_worker.server import DecodeServer
    from engine.replica import Replica
    from prefill_worker.server import PrefillServer

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 5.0  # a drained worker's last pages are quiet long before


class RoleHost:
    """A worker server whose role may change. After a failed flip only `stop` may be called."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = self._make(config, None)

    def _make(self, config: WorkerConfig, replica: Replica | None) -> PrefillServer | DecodeServer:
        # Imported here: only a worker's process pays for torch, after its thread bounds are set.
        server: PrefillServer | DecodeServer
        if config.role is Role.PREFILL:
            from prefill_worker.server import PrefillServer

            server = PrefillServer(config, replica)
        else:
            from decode_worker.server import DecodeServer

            server = DecodeServer(config, replica)
        server.failed.add_done_callback(self._on_failed)
        return server

    def _on_failed(self, failed: asyncio.Future[None]) -> None:
        error = None if failed.cancelled() else failed.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    @property
    def worker_id(self) -> str:
        return self._config.worker_id

    @property
    def role(self) -> Role:
        return self._config.role

    @property
    def epoch(self) -> Epoch:
        return self._server.epoch

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def server(self) -> PrefillServer | DecodeServer:
        return self._server

    async def start(self, on_progress: Callable[[float], None] = lambda share: None) -> None:
        """Raises CheckpointError or ConfigError."""
        await self._server.start(on_progress)

    async def flip(self, worker_id: WorkerId, role: Role) -> None:
        """Serves in the other role from now on, under this name and a new epoch.

        The worker must have been drained: what it still has ends. Raises Unavailable where a peer may still write into
        its pages; they cannot be used then.
        """
        if role is self.role:
            raise InvalidInput("role", f"is {role.value}, which {self.worker_id} has already")
        old, before = self._server, self.worker_id
        await old.wait_idle(IDLE_TIMEOUT_S)
        await old.stop()
        assert old.replica is not None
        if num_pinned := old.replica.num_pinned_pages:
            raise Unavailable(f"{before} cannot change its role: {num_pinned} of its pages may still be written")
        self._config = self._config.model_copy(update={"role": role, "worker_id": worker_id})
        self._server = self._make(self._config, old.replica)
        await self._server.start()
        log.info("%s is %s, epoch %d", before, worker_id, self.epoch)

    async def leave(self) -> None:
        await self._server.leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        return await self._server.wait_idle(timeout_s)

    async def stop(self) -> None:
        await self._server.stop()
