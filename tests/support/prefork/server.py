"""`python -m tests.support.prefork.server FD RAY_FD`: forks a process for each module that it is asked to run.

Reads requests from the socket FD, answers each with the process's id, and reports when it ends. The server ends when
the socket does. At the listening socket RAY_FD it forks workers of Ray for `tests.support.prefork.ray_worker`: each
connection asks for one worker, gets an answer when that ends, and ends it by hanging up.
"""

from __future__ import annotations

import atexit
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
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

# Ray is not imported here: the library that it loads reads a worker's environment at that moment.
PRELOADED = ("cluster.local.role_host", "prefill_worker.server", "decode_worker.server", "router.server")
MAX_REQUEST_BYTES = 256 * 1024
_NUM_FILES = 2  # stdout and stderr of the process


@dataclass(frozen=True, slots=True)
class _Job:
    """Holds the code that a forked process is to run, and its files."""

    code: str  # a module's name, or a script's path
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


class _Server:
    def __init__(self, control: socket.socket, ray_workers: socket.socket) -> None:
        self._control = control
        self._ray_workers = ray_workers
        self._selector = selectors.DefaultSelector()  # with what to do when a file is readable
        self._watch(control, self._fork_for_control)
        self._watch(ray_workers, self._accept)
        self._is_over = False

    def run(self) -> _Job | None:
        """Serves until the socket ends. Returns a job in a process that was forked for it, and None in this one."""
        while not self._is_over:
            for ready, _ in self._selector.select():
                if job := ready.data():
                    return job
        return None

    def _watch(self, file: Any, on_readable: Callable[[], _Job | None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, on_readable)

    def _fork_for_control(self) -> _Job | None:
        job = _receive(self._control)
        if job is None:
            self._is_over = True
            return None
        child = self._fork(job)
        if child == 0:
            return job
        _answer(self._control, {"started": child})
        self._when_ended(child, lambda status: _answer(self._control, {"ended": child, "status": status}))
        return None

    def _accept(self) -> _Job | None:
        asking, _ = self._ray_workers.accept()
        job = _receive(asking)
        if job is None:
            asking.close()
            return None
        child = self._fork(job)
        if child == 0:
            asking.close()
            return job
        has_ended = False

        def hang_up() -> None:
            self._selector.unregister(asking)
            asking.close()
            if not has_ended:
                os.kill(child, signal.SIGKILL)

        def report(status: int) -> None:
            nonlocal has_ended
            has_ended = True
            if asking.fileno() >= 0:
                _answer(asking, {"status": status})

        self._watch(asking, hang_up)
        self._when_ended(child, report)
        return None

    def _fork(self, job: _Job) -> int:
        """Returns 0 in the new process, which keeps nothing of the server except the job, and its id in this one."""
        child = os.fork()
        if child == 0:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
            self._selector.close()
        else:
            for file in job.files:
                os.close(file)
        return child

    def _when_ended(self, child: int, report: Callable[[int], None]) -> None:
        pidfd = os.pidfd_open(child)

        def reap() -> None:
            _, status = os.waitpid(child, 0)
            self._selector.unregister(pidfd)
            os.close(pidfd)
            report(os.waitstatus_to_exitcode(status))

        self._watch(pidfd, reap)


def _receive(asking: socket.socket) -> _Job | None:
    """Returns what a peer asks for, or None if it has hung up."""
    with contextlib.suppress(ConnectionError):
        request, files, _, _ = socket.recv_fds(asking, MAX_REQUEST_BYTES, _NUM_FILES)
        return _Job(**json.loads(request), files=files) if request else None
    return None


def _answer(asking: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the peer has gone; the loop reads the end of its connection
        asking.send(json.dumps(message).encode())


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
    sys.argv = [job.code, *job.arguments]
    if job.code.endswith(".py"):
        runpy.run_path(job.code, run_name="__main__")
    else:
        runpy.run_module(job.code, run_name="__main__", alter_sys=True)


def _status_of(job: _Job) -> int:
    """Runs the job, and returns the exit status that Python would give it."""
    try:
        _become(job)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """Ends this process as Python does, but frees no memory, since each page would be copied first."""
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the tests
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # otherwise each process would copy what its first collection touches
    control_fd, ray_workers_fd = map(int, sys.argv[1:])
    with socket.socket(fileno=control_fd) as control, socket.socket(fileno=ray_workers_fd) as ray_workers:
        job = _Server(control, ray_workers).run()
    if job is not None:
        _end(_status_of(job))


if __name__ == "__main__":
    main()
