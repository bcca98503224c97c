"""Runs vLLM's own OpenAI servers for `benchmarks.serving`: a colocated one, or one of a prefill and decode pair.

In a pair the decode server pulls pages through NIXL; the prefill server's response says from where. The threads of its
agents cannot be turned off; they get as few as vLLM lets us configure.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

from benchmarks.common.process_group import ProcessGroup
from benchmarks.common.vllm_process import Vllm
from benchmarks.serving.deployments import SERVED_MODEL

_TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
}
_START_TIMEOUT_S, _POLL_S = 900.0, 0.5


class VllmServer(ProcessGroup):
    """`vllm serve` as a process group; entering it waits until the server is healthy."""

    def __init__(
        self,
        vllm: Vllm,
        folder: Path,
        cores: Sequence[int],
        max_sequences: int,
        max_context: int,
        is_paired: bool = False,
    ) -> None:
        port, side_port = _free_ports(2)
        self.address = f"127.0.0.1:{port}"
        options: dict[str, object] = {
            "--model": folder,
            "--served-model-name": SERVED_MODEL,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": "bfloat16",
            "--max-model-len": max_context,
            "--max-num-seqs": max_sequences,
        }
        command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
        environment = vllm.environment(cores)
        if is_paired:
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
            options["--kv-transfer-config"] = json.dumps(_TRANSFER)
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        words = [str(word) for option in options.items() for word in option]
        super().__init__([*command, *words], environment, is_piped=False)

    def __enter__(self) -> Self:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            while not self._is_healthy():
                if self._popen.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"vLLM's server did not start: {self._log_tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self.close()
            raise
        return self

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5.0) as response:
                return bool(response.status == 200)
        except OSError:
            return False  # it does not listen yet


class VllmPrefill:
    """Has prompts computed by the prefill server of a pair before their requests go to the decode server."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/v1/completions"
        self._session = aiohttp.ClientSession()

    async def prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with vLLM's description of where the prompt's pages are."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        prefill_body = {name: body[name] for name in ("model", "prompt")}
        prefill_body |= {"max_tokens": 1, "kv_transfer_params": wanted | unknown}
        async with self._session.post(self._url, json=prefill_body, raise_for_status=True) as response:
            return body | {"kv_transfer_params": (await response.json())["kv_transfer_params"]}

    async def close(self) -> None:
        await self._session.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
