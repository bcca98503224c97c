"""Runs plain worker and router processes on this host, without Ray, for tests and benchmarks.

They are the same workers and routers that Ray actors wrap. Nothing supervises them: a process that dies stays dead.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
from pydantic import BaseModel

from penstock.config import RouterConfig, WorkerConfig
from penstock.errors import Unavailable
from penstock.types import Role
from tests.support.prefork.module_process import ModuleProcess, start_module

_STOP_TIMEOUT_S = 20.0
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Process:
    """Represents a running process and the ready line that it printed."""

    popen: ModuleProcess
    ready: Mapping[str, object]
    log: Path

    @property
    def address(self) -> str:
        """Returns host:port of its gRPC server."""
        return str(self.ready.get("address") or self.ready.get("grpc"))

    @property
    def http(self) -> str:
        """Returns host:port of a router's HTTP server."""
        return str(self.ready["http"])

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(_STOP_TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)


class Deployment:
    """Starts processes, and ends all of them with its `with` block."""

    def __init__(self, start_timeout_s: float = 240.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._processes: list[Process] = []

    def start_workers(
        self, configs: Sequence[WorkerConfig], cpus: Sequence[int | None] = (), *, fresh: bool = False
    ) -> list[Process]:
        """Starts workers side by side and returns once all are ready. `cpus[i]`, if given, is worker i's only core.

        Each is a new Python if `fresh`, otherwise possibly a fork (tests.support.prefork).
        """
        modules = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker"}
        started = []
        for index, config in enumerate(configs):
            cpu = cpus[index] if index < len(cpus) else None
            started.append(self._spawn(modules[config.role], config, config.engine.num_threads, cpu, fresh))
        return [self._wait(popen, log) for popen, log in started]

    def start_hosts(self, configs: Sequence[WorkerConfig]) -> list[Process]:
        """Starts workers whose role and weights can change, and returns once all are ready."""
        module = "cluster.local.worker"
        started = [self._spawn(module, config, config.engine.num_threads, None, False) for config in configs]
        return [self._wait(popen, log) for popen, log in started]

    def start_router(self, config: RouterConfig, cpu: int | None = None, *, fresh: bool = False) -> Process:
        """Starts a router and returns once it is ready. `cpu`, if given, is its only core."""
        return self._wait(*self._spawn("router", config, None, cpu, fresh))

    def _spawn(
        self, module: str, config: BaseModel, num_threads: int | None, cpu: int | None, fresh: bool
    ) -> tuple[ModuleProcess, Path]:
        name = f"{module}-{len(os.listdir(self._folder.name))}"
        path, log = Path(self._folder.name, f"{name}.json"), Path(self._folder.name, f"{name}.log")
        path.write_text(config.model_dump_json())
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads)) if num_threads else {}
        with log.open("wb") as stderr:
            popen = start_module(module, ["--config", str(path)], stderr, environment=threads, cpu=cpu, fresh=fresh)
        return popen, log

    def _wait(self, popen: ModuleProcess, log: Path) -> Process:
        """Returns the process once it has printed its ready line. Raises Unavailable with the end of its log."""
        deadline_s = time.monotonic() + self._start_timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(popen.stdout, selectors.EVENT_READ)
            line = b""
            while not line.endswith(b"\n"):
                if not selector.select(deadline_s - time.monotonic()):
                    popen.kill()
                    raise Unavailable(f"{log.stem} was not ready within {self._start_timeout_s:g} s: {log_tail(log)}")
                piece = os.read(popen.stdout.fileno(), 4096)
                if not piece:
                    raise Unavailable(f"{log.stem} ended with status {popen.wait(_STOP_TIMEOUT_S)}: {log_tail(log)}")
                line += piece
        process = Process(popen, json.loads(line), log)
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """Asks every process to end, and kills those that have not ended in time."""
        for process in self._processes:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGINT)  # SIGTERM would wait for running requests
        for process in self._processes:
            try:
                process.popen.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            process.popen.stdout.close()
        self._processes.clear()
        self._folder.cleanup()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def wait_until_followed(router: Process, num_workers: int, timeout_s: float = 60.0) -> None:
    """Waits until the router dispatches to that many workers. A router is ready once it knows one decode worker, which
    computes prompts until the router knows a prefill worker. Raises Unavailable."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        metrics = httpx.get(f"http://{router.http}/metrics", timeout=timeout_s).text
        found = sum(map(float, re.findall(r"(?m)^penstock:workers\{.*\} (\S+)$", metrics)))
        if found >= num_workers:
            return
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the router knows {found:g} workers, not {num_workers}: {log_tail(router.log)}")
        time.sleep(0.02)


def log_tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(no log)"
