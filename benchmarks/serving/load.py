"""The load of serving benchmarks: plans requests and arrival times, sends them over gRPC or OpenAI's HTTP API.

Latencies are those that a caller sees: the time to the first piece of text and the gaps between pieces, so that a
server that puts two tokens into a piece has longer gaps. The number of tokens is the one that the server reports.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.common.report import percentile
from penstock import AsyncClient

_TIMEOUT_S = 120.0
_LINE_LIMIT = 1 << 20


@dataclass(slots=True)
class RequestPlan:
    """One request."""

    arrival_s: float  # since the start of the run
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class ServingLatencies:
    """The latencies of one run in seconds, and its tokens."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    num_tokens: int = 0
    elapsed_s: float = 0.0

    def figures(self) -> tuple[float, float, float, float, float]:
        """Returns TTFT p50 and p99, ITL p50 and p99 in ms, and output tokens per second."""
        latencies = [percentile(values, share) * 1e3 for values in (self.ttft, self.itl) for share in (0.5, 0.99)]
        return (latencies[0], latencies[1], latencies[2], latencies[3], self.num_tokens / self.elapsed_s)


class StreamTimer:
    """Times the pieces of one stream from the moment of its construction."""

    def __init__(self, latencies: ServingLatencies) -> None:
        self._latencies = latencies
        self._last_s = time.perf_counter()
        self._is_first = True

    def on_piece(self) -> None:
        now_s = time.perf_counter()
        (self._latencies.ttft if self._is_first else self._latencies.itl).append(now_s - self._last_s)
        self._last_s, self._is_first = now_s, False


def make_plans(rate: float, num_requests: int, vocab_size: int, seed: int = 0) -> list[RequestPlan]:
    rng = random.Random(seed)
    plans, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        prompt = rng.choices(range(3, vocab_size), k=rng.randint(64, 1024))
        plans.append(RequestPlan(now_s, prompt, rng.randint(16, 96)))
    return plans


async def run(address: str, plans: Sequence[RequestPlan]) -> ServingLatencies:
    """Sends the requests over gRPC; greedy, end of sequence ignored."""
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:

        async def send(plan: RequestPlan, timer: StreamTimer) -> int:
            received = 0
            stream = client.generate(plan.prompt, max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=True)
            async for chunk in stream:
                if chunk.token_ids:
                    timer.on_piece()
                    received += len(chunk.token_ids)
            return received

        return await _send_all(plans, send)


async def run_http(address: str, model: str, plans: Sequence[RequestPlan], vllm_prefill: str = "") -> ServingLatencies:
    """Sends the requests as streams of `/v1/completions`, with a connection each.

    Prompts go to `vllm_prefill` first, if given, and what it returns about their pages goes on to `address`, as in
    vLLM's proxies.
    """

    async def send(plan: RequestPlan, timer: StreamTimer) -> int:
        body: dict[str, object] = {
            "model": model,
            "prompt": plan.prompt,
            "max_tokens": plan.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with asyncio.timeout(_TIMEOUT_S):
            if vllm_prefill:
                body["kv_transfer_params"] = await _prefill(vllm_prefill, model, plan.prompt)
            return await stream_completion(address, json.dumps(body).encode(), timer)

    return await _send_all(plans, send)


async def _send_all(
    plans: Sequence[RequestPlan], send: Callable[[RequestPlan, StreamTimer], Awaitable[int]]
) -> ServingLatencies:
    """Sends every request at its time and times its pieces."""
    latencies = ServingLatencies()
    started_s = time.perf_counter()

    async def send_one(plan: RequestPlan) -> None:
        await asyncio.sleep(max(0.0, started_s + plan.arrival_s - time.perf_counter()))
        received = await send(plan, StreamTimer(latencies))
        assert received == plan.max_tokens, f"{received} tokens instead of {plan.max_tokens}"
        latencies.num_tokens += received

    await asyncio.gather(*map(send_one, plans))
    latencies.elapsed_s = time.perf_counter() - started_s
    return latencies


async def _prefill(address: str, model: str, prompt: list[int]) -> object:
    """Returns vLLM's description of where the prompt's pages are."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": wanted | unknown}
    async with _posted(address, json.dumps(body).encode()) as reader:
        while (await reader.readline()).strip():
            pass  # headers
        return json.loads(await reader.read())["kv_transfer_params"]


async def stream_completion(address: str, body: bytes, timer: StreamTimer) -> int:
    """Reports each piece of text to `timer` and returns the number of tokens that the server counted."""
    async with _posted(address, body) as reader:
        num_tokens = 0
        async for data in _events(reader):
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            if any(choice.get("text") for choice in event.get("choices", ())):
                timer.on_piece()
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        return int(num_tokens)


@asynccontextmanager
async def _posted(address: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Posts a completion on a new connection and yields the response after its status line."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1), limit=_LINE_LIMIT)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}")
        yield reader
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events up to `[DONE]`; skips the lines with the sizes of HTTP chunks."""
    while line := await reader.readline():
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield data
    raise RuntimeError("the stream ended without [DONE]")
