"""`python -m tests.support.prefork.server FD`: forks a process for each module that it is asked to run.

Reads requests from the socket FD, answers each with the process's id, and reports when it ends. Its own end is the
socket's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

PRELOADED = ("cluster.local.role_host", "prefill_worker.server", "decode_worker.server", "router.server")
MAX_REQUEST_BYTES = 256 * 1024
_NUM_FILES = 2  # stdout and stderr of the process


@dataclass(frozen=True, slots=True)
class _Job:
    """What a forked process is to run, and its files."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> _Job | None:
        """Serves until the socket ends. Returns a job in the process that was forked for it, and None in this one."""
        while True:
            for ready, _ in self._selector.select():
                if ready.fileobj is not self._control:
                    self._report(ready.fd, ready.data)
                    continue
                request, files, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, _NUM_FILES)
                if not request:
                    return None
                if job := self._fork(_Job(**json.loads(request), files=files)):
                    return job

    def _fork(self, job: _Job) -> _Job | None:
        child = os.fork()
        if child == 0:
            for pidfd in [fd for fd, key in self._selector.get_map().items() if key.fileobj is not self._control]:
                os.close(pidfd)
            self._selector.close()
            self._control.close()
            return job
        for file in job.files:
            os.close(file)
        self._selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)
        self._answer({"started": child})
        return None

    def _report(self, pidfd: int, child: int) -> None:
        _, status = os.waitpid(child, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._answer({"ended": child, "status": os.waitstatus_to_exitcode(status)})

    def _answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody is there to ask for more: `run` reads the end
            self._control.send(json.dumps(message).encode())


def _become(job: _Job) -> None:
    """Makes this forked process what `python -m MODULE` would have been."""
    for number, file in enumerate(job.files, start=1):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    if num_threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(num_threads))  # OpenMP read its environment long ago
    sys.argv = [job.module, *job.arguments]
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # else each process would copy what its first collection touches
    with socket.socket(fileno=int(sys.argv[1])) as control:
        job = _Server(control).run()
    if job is not None:
        _become(job)


if __name__ == "__main__":
    main()
