"""The load of serving benchmarks: requests and when they arrive, sent over gRPC or as OpenAI clients do.

What counts is when a caller gets something: the first piece of text, and the gaps between pieces. A server that puts
two tokens into a piece has longer gaps to show for it. How many tokens came is told by its own count at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.report import percentile
from penstock import AsyncClient

_TIMEOUT_S = 120.0
_LINE_LIMIT = 1 << 20


@dataclass(slots=True)
class Plan:
    """One request: when it arrives and what it asks for."""

    arrival_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Outcome:
    """Of one run; seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    num_tokens: int = 0
    elapsed_s: float = 0.0

    def figures(self) -> tuple[float, float, float, float, float]:
        """TTFT p50, p99, ITL p50, p99 in ms, output tokens per second."""
        latencies = [percentile(values, share) * 1e3 for values in (self.ttft, self.itl) for share in (0.5, 0.99)]
        return (latencies[0], latencies[1], latencies[2], latencies[3], self.num_tokens / self.elapsed_s)


class Watch:
    """Of one request's pieces, from when it was sent."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._last_s = time.perf_counter()
        self._is_first = True

    def on_piece(self) -> None:
        now_s = time.perf_counter()
        (self._outcome.ttft if self._is_first else self._outcome.itl).append(now_s - self._last_s)
        self._last_s, self._is_first = now_s, False


def make_plans(rate: float, num_requests: int, vocab_size: int, seed: int = 0) -> list[Plan]:
    rng = random.Random(seed)
    plans, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        prompt = rng.choices(range(3, vocab_size), k=rng.randint(64, 1024))
        plans.append(Plan(now_s, prompt, rng.randint(16, 96)))
    return plans


async def run(address: str, plans: Sequence[Plan]) -> Outcome:
    """Over gRPC; greedy, end of sequence ignored."""
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:

        async def send(plan: Plan, watch: Watch) -> int:
            received = 0
            stream = client.generate(plan.prompt, max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=True)
            async for chunk in stream:
                if chunk.token_ids:
                    watch.on_piece()
                    received += len(chunk.token_ids)
            return received

        return await _send_all(plans, send)


async def run_http(address: str, model: str, plans: Sequence[Plan], vllm_prefill: str = "") -> Outcome:
    """The same as streams of `/v1/completions`, a connection each. `vllm_prefill`: prompts go to this server of vLLM's
    first, and what it says of its pages to the other, as vLLM's proxies do."""

    async def send(plan: Plan, watch: Watch) -> int:
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
            return await stream_completion(address, json.dumps(body).encode(), watch)

    return await _send_all(plans, send)


async def _send_all(plans: Sequence[Plan], send: Callable[[Plan, Watch], Awaitable[int]]) -> Outcome:
    """Sends every request at its time and records when its pieces come."""
    outcome = Outcome()
    started_s = time.perf_counter()

    async def one(plan: Plan) -> None:
        await asyncio.sleep(max(0.0, started_s + plan.arrival_s - time.perf_counter()))
        received = await send(plan, Watch(outcome))
        assert received == plan.max_tokens, f"{received} tokens, {plan.max_tokens} asked for"
        outcome.num_tokens += received

    await asyncio.gather(*map(one, plans))
    outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


async def _prefill(address: str, model: str, prompt: list[int]) -> object:
    """Where the prompt's pages wait, in vLLM's words."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": wanted | unknown}
    async with _posted(address, json.dumps(body).encode()) as reader:
        while (await reader.readline()).strip():
            pass  # headers
        return json.loads(await reader.read())["kv_transfer_params"]


async def stream_completion(address: str, body: bytes, watch: Watch) -> int:
    """Tells `watch` of each piece of text; tokens of the completion, as the server counts them."""
    async with _posted(address, body) as reader:
        num_tokens = 0
        async for data in _events(reader):
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the stream broke off: {event['error']}")
            if any(choice.get("text") for choice in event.get("choices", ())):
                watch.on_piece()
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        return int(num_tokens)


@asynccontextmanager
async def _posted(address: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """What comes behind the status line, on a connection of its own."""
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
    """Data of server-sent events up to `[DONE]`. Sizes of HTTP's chunks are lines too, which never begin as data do."""
    while line := await reader.readline():
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield data
    raise RuntimeError("the stream ended without [DONE]")
