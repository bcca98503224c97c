"""vLLM's own OpenAI servers for `benchmarks.serving`: one that does everything, or one of a prefill and decode pair.

Of a pair, decode pulls pages through NIXL, as the answer to the prompt's request tells it. Its agents' threads cannot
be turned off; they get as few as vLLM lets us say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.vllm_process import Vllm, end_group

NAME = "bench"
_TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
}
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _POLL_S = 900.0, 30.0, 0.5


class VllmServer:
    """`vllm serve`, in a process group of its own that ends with the `with` block. Answers once it is entered."""

    def __init__(
        self,
        vllm: Vllm,
        folder: Path,
        cores: Sequence[int],
        max_sequences: int,
        max_context: int,
        of_pair: bool = False,
    ) -> None:
        port, side_port = _free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed on exit
        options: dict[str, object] = {
            "--model": folder,
            "--served-model-name": NAME,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": "bfloat16",
            "--max-model-len": max_context,
            "--max-num-seqs": max_sequences,
        }
        command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
        environment = vllm.environment(cores)
        if of_pair:
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
            options["--kv-transfer-config"] = json.dumps(_TRANSFER)
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
        try:
            self._popen.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_STOP_TIMEOUT_S)
        finally:
            end_group(self._popen)
        self._log.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
