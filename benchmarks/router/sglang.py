"""Compares sglang-router, if installed, with Penstock's HTTP API: a null HTTP worker for it, and one client for both.

sglang-router routes by the prompt's characters and forwards bytes; Penstock tokenizes, detokenizes and holds the
request's lease. Both answer POST /v1/completions with one token here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence

from benchmarks.common.report import percentile
from benchmarks.router.load import make_text

_ANSWER = json.dumps(
    {
        "id": "null",
        "object": "text_completion",
        "created": 0,
        "model": "null",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
_START_TIMEOUT_S = 30.0


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request of a connection with the canned response."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)
    try:
        while True:
            await reader.readexactly(_body_length(await reader.readuntil(b"\r\n\r\n")))
            writer.write(head + _ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _body_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


async def serve_http_worker() -> None:
    server = await asyncio.start_server(_serve_one, "127.0.0.1", 0, limit=1 << 20)
    print(json.dumps({"address": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await server.serve_forever()


async def load_http(addresses: Sequence[str], num_requests: int, num_characters: int) -> None:
    """Alternates one client between the addresses and prints the median seconds of each."""
    rng = random.Random(0)
    connections = [await asyncio.open_connection(*address.rsplit(":", 1), limit=1 << 20) for address in addresses]
    taken: list[list[float]] = [[] for _ in addresses]
    for number in range(num_requests):
        text = f"{number} " + make_text(rng, num_characters)
        body = json.dumps({"model": "null", "prompt": text, "max_tokens": 1}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        for (reader, writer), seconds in zip(connections, taken, strict=True):
            started_s = time.perf_counter()
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(_body_length(answer))
            seconds.append(time.perf_counter() - started_s)
            assert answer.startswith(b"HTTP/1.1 200"), answer
    print(json.dumps([percentile(seconds, 0.5) for seconds in taken]), flush=True)


def start_sglang_router(worker: str, core: int, python: str | None) -> tuple[subprocess.Popen[bytes], str] | None:
    """Returns the process and its address, or None if it is not installed; `python` may be another environment's."""
    if python is None and importlib.util.find_spec("sglang_router") is None:
        return None
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
    address = f"127.0.0.1:{port}"
    options = ["--host", "127.0.0.1", "--port", port, "--worker-urls", f"http://{worker}", "--log-level", "error"]
    command = ["taskset", "-c", str(core), python or sys.executable, "-m", "sglang_router.launch_router", *options]
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not _answers(address):
        popen.terminate()
        raise RuntimeError(f"sglang-router at {address} did not answer within {_START_TIMEOUT_S:g} s")
    return popen, address


def _answers(address: str) -> bool:
    """Waits until it serves a request, and returns False if it does not in time."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    body = json.dumps({"model": "null", "prompt": "hello", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/completions", body, {"content-type": "application/json"}, method="POST"
    )
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError as error:
            print(f"waiting for sglang-router: {error!r}", file=sys.stderr)
        time.sleep(0.5)
    return False
