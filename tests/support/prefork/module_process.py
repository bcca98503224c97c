"""Starts `python -m MODULE`: forked from a server that has imported everything, or as a new Python."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any
from unittest import mock

from tests.support.prefork import ray_worker
from tests.support.prefork.server import MAX_REQUEST_BYTES
from tests.support.suite import own_processes

ROOT = Path(__file__).resolve().parents[3]
_FORK_TIMEOUT_S = 240.0  # for the first process, which waits for the server's imports


class ModuleProcess:
    """Represents a running process whose stdout is a pipe to this one. `ended` gets its exit status, as `subprocess`
    counts it."""

    def __init__(self, pid: int, stdout: IO[bytes], ended: Future[int]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.ended = ended

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        return self.ended.result() if self.ended.done() else None

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status. Raises subprocess.TimeoutExpired."""
        try:
            return self.ended.result(timeout_s)
        except FutureTimeoutError as error:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s) from error

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the signal, unless the process has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return  # its end is about to be reported

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ForkServer:
    """Holds a server process and the processes that it has forked."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-forks-")
        self.path = str(Path(self._folder.name, "ray-workers"))
        ray_workers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ray_workers.bind(self.path)
        ray_workers.listen()
        files = [theirs.fileno(), ray_workers.fileno()]
        command = [sys.executable, "-m", "tests.support.prefork.server", *map(str, files)]
        # Threads of a numerical library would be missing in the forked processes.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        with theirs, ray_workers:
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment, pass_fds=files
            )
        self._starting = threading.Lock()  # one at a time, so that answers need no numbers
        # Ids of started processes; None means that the server has ended.
        self._answers: SimpleQueue[int | None] = SimpleQueue()
        self._exits: dict[int, Future[int]] = {}
        threading.Thread(target=self._read, name="prefork", daemon=True).start()

    def is_alive(self) -> bool:
        return self._server.poll() is None

    def fork(self, request: Mapping[str, Any], stderr: int) -> ModuleProcess:
        """Returns a process that was forked for this request. Raises OSError if the server has ended."""
        message = json.dumps(request).encode()
        assert len(message) <= MAX_REQUEST_BYTES
        reader, writer = os.pipe()
        stdout = os.fdopen(reader, "rb", buffering=0)
        with self._starting:
            try:
                socket.send_fds(self._control, [message], [writer, stderr])
            finally:
                os.close(writer)
            pid = self._answers.get(timeout=_FORK_TIMEOUT_S)
        if pid is None:
            raise OSError("the fork server was killed")
        return ModuleProcess(pid, stdout, self._exits[pid])

    def _read(self) -> None:
        while message := self._control.recv(MAX_REQUEST_BYTES):
            match json.loads(message):
                case {"started": pid}:
                    self._exits[pid] = _new_exit()
                    self._answers.put(pid)
                case {"ended": pid, "status": status}:
                    self._exits[pid].set_result(status)
        self._answers.put(None)
        for pid, ended in self._exits.items():  # they have lost their parent, and nobody else would end them
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended.set_result(-signal.SIGKILL)


def _new_exit() -> Future[int]:
    ended: Future[int] = Future()
    ended.set_running_or_notify_cancel()  # each waiter may give up, only for itself
    return ended


class _Starter:
    """Holds this process's server, once there is one."""

    def __init__(self) -> None:
        self.forks = False
        self._server: _ForkServer | None = None
        self._making = threading.Lock()

    def server(self) -> _ForkServer:
        with self._making:
            if self._server is None or not self._server.is_alive():
                self._server = _ForkServer()
            return self._server


_starter = _Starter()


def use_forks() -> None:
    """Makes `start_module` fork from now on. The first process starts the server."""
    _starter.forks = True


@contextlib.contextmanager
def forked_ray_workers() -> Iterator[None]:
    """Forks the workers of every Ray that starts within the block, if `use_forks` was called, as `start_module`
    does."""
    if not _starter.forks:
        yield
        return
    from ray._private.parameter import RayParams  # most processes of tests never need Ray

    server = _starter.server()
    init = functools.partialmethod(RayParams.__init__, setup_worker_path=ray_worker.__file__)
    with mock.patch.object(RayParams, "__init__", init), mock.patch.dict(os.environ, {ray_worker.SOCKET: server.path}):
        yield


def start_module(
    module: str,
    arguments: Sequence[str],
    stderr: IO[bytes],
    *,
    environment: Mapping[str, str] | None = None,
    cpu: int | None = None,
    fresh: bool = False,
) -> ModuleProcess:
    """Starts `python -m MODULE ARGUMENTS` with this process's environment and what `environment` adds.

    It is a new Python instead of a fork if it is `fresh`, or runs only on the core `cpu`.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    if _starter.forks and not fresh and cpu is None:
        own_processes.check([sys.executable, "-m", module])
        request = {
            "code": module,
            "arguments": list(arguments),
            "environment": variables,
            "folder": str(ROOT),
        }
        return _starter.server().fork(request, stderr.fileno())
    command = [sys.executable, "-m", module, *arguments]
    if cpu is not None:
        command = ["taskset", "-c", str(cpu), *command]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, env=variables, bufsize=0)
    assert popen.stdout is not None
    ended = _new_exit()
    threading.Thread(target=lambda: ended.set_result(popen.wait()), name="wait", daemon=True).start()
    return ModuleProcess(popen.pid, popen.stdout, ended)
