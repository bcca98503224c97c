"""Runs the child processes of benchmarks, each in a process group of its own that ends with a `with` block."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 30.0
_LOG_TAIL_BYTES = 2000


class ProcessGroup:
    """Owns a child process and all its descendants. Its stderr goes to a log, whose end error messages quote."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], *, is_piped: bool) -> None:
        """Starts the command. Its stdout goes to the log and its stdin is empty, unless `is_piped` makes them pipes."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if is_piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else self._log,
            stderr=self._log,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def _log_tail(self) -> str:
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip() or "(no log)"

    def _ask_to_end(self) -> None:
        self._popen.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Asks the process to end, and kills what is left of its group after a while."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                self._ask_to_end()
                self._popen.wait(_STOP_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(_STOP_TIMEOUT_S)
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PipedProcess(ProcessGroup):
    """Talks to a process that prints one line when it is ready and one for each line that it reads, and that exits at
    the end of its input.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        super().__init__(command, environment, is_piped=True)
        self._buffer = b""

    def read_line(self, timeout_s: float) -> str:
        """Returns the next line. Raises RuntimeError with the end of the log if none comes in time."""
        assert self._popen.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(deadline_s - time.monotonic()):
                    raise RuntimeError(f"no answer within {timeout_s:g} s: {self._log_tail()}")
                piece = os.read(self._popen.stdout.fileno(), 65536)
                if not piece:
                    raise RuntimeError(f"ended with status {self._popen.wait(_STOP_TIMEOUT_S)}: {self._log_tail()}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def write_line(self, line: str) -> None:
        """Writes a line; does nothing if the process has ended, which the next `read_line` reports."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode() + b"\n")
            self._popen.stdin.flush()

    def pause(self) -> None:
        """Stops the whole group, so that it takes no processor time until `resume`."""
        os.killpg(self._popen.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which the next `read_line` reports
            os.killpg(self._popen.pid, signal.SIGCONT)

    def _ask_to_end(self) -> None:
        assert self._popen.stdin is not None
        self.resume()
        self._popen.stdin.close()
