"""vLLM's own OpenAI server, colocated, for `benchmarks.serving`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from benchmarks.vllm_process import Vllm

NAME = "bench"
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _POLL_S = 900.0, 30.0, 0.5


class VllmServer:
    """`vllm serve`, in a process group of its own that ends with the `with` block. Answers once it is entered."""

    def __init__(self, vllm: Vllm, folder: Path, num_threads: int, max_sequences: int, max_context: int) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed on exit
        options = {
            "--model": folder,
            "--served-model-name": NAME,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": "bfloat16",
            "--max-model-len": max_context,
            "--max-num-seqs": max_sequences,
        }
        command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
        environment = vllm.environment(num_threads)
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        self._popen = subprocess.Popen(
            [*command, *(str(word) for option in options.items() for word in option)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> VllmServer:
        limit_s = time.monotonic() + _START_TIMEOUT_S
        try:
            while not self._is_healthy():
                if self._popen.poll() is not None or time.monotonic() > limit_s:
                    raise RuntimeError(f"vLLM's server did not come up: {self._tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _is_healthy(self) -> bool:
        host, port = self.address.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout=5.0) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
                return connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            return False  # nobody listens there yet

    def _tail(self) -> str:
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - 2000))
        return self._log.read().decode(errors="replace").strip() or "(no log)"

    def _stop(self) -> None:
        """Asked first; whoever of its group is left after a while is killed."""
        self._popen.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # nobody is left of it
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(_STOP_TIMEOUT_S)
        self._log.close()
