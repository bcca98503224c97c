"""Shares plain workers and a router among several tests, although each test may kill or freeze some of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.config import RouterConfig, WorkerConfig
from tests.support.plain_processes import Deployment, Process, wait_until_followed


class MendedFleet:
    """Owns the workers of some configurations and a router over them; the deployment ends them."""

    def __init__(self, deployment: Deployment, configs: Sequence[WorkerConfig]) -> None:
        self._deployment = deployment
        self._configs = {config.worker_id: config for config in configs}
        self._workers: dict[str, Process] = {}
        self._router: Process | None = None

    @property
    def workers(self) -> list[Process]:
        """Returns the workers in the order of their configurations."""
        return [self._workers[name] for name in self._configs]

    @property
    def router(self) -> Process:
        """Returns a router that no other test has used, so that only this test shapes its view of the workers'
        health."""
        assert self._router is not None
        return self._router

    def mend(self) -> None:
        """Restarts each dead or frozen worker, and starts another router."""
        for process in filter(_needs_kill, self._workers.values()):
            process.kill()
        gone = {name: config for name, config in self._configs.items() if not self._runs(name)}
        self._workers |= zip(gone, self._deployment.start_workers(list(gone.values())), strict=True)
        if self._router is not None:
            self._router.kill()
        self._router = self.start_router()

    def start_router(self) -> Process:
        """Returns one more router, which follows all present workers."""
        model = next(iter(self._configs.values())).engine.model
        addresses = tuple(process.address for process in self.workers)
        router = self._deployment.start_router(RouterConfig(model=model, grpc_port=0, http_port=0, workers=addresses))
        wait_until_followed(router, len(addresses))
        return router

    def _runs(self, name: str) -> bool:
        return name in self._workers and self._workers[name].popen.poll() is None


def _needs_kill(process: Process) -> bool:
    """Returns whether a process has to be killed before it counts as gone."""
    if process.popen.poll() is not None:
        return False
    try:
        status = Path(f"/proc/{process.popen.pid}/stat").read_text()
    except FileNotFoundError:  # it has just ended, which `poll` does not say yet
        return True
    return status.rpartition(")")[2].split()[0] == "T"
