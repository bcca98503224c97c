"""Runs clients for `benchmarks.router`: a fixed number in one process, each with one request at a time."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from benchmarks.common.report import percentile
from penstock.v1 import inference_pb2

_GENERATE = "/penstock.v1.Inference/Generate"
_ROUTE = "/penstock.v1.Inference/Route"
_STREAM = "/penstock.v1.Lookaside/Stream"
_LIMITS = [("grpc.max_receive_message_length", 1 << 26), ("grpc.max_send_message_length", 1 << 26)]
_SYLLABLES = ("ta", "ri", "no", "mel", "o", "sta", "quen", "ver", "i", "dul", "ca", "pen", "sto", "ck", "wa", "ter")


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """The requests to send, and where to send them."""

    address: str
    num_clients: int
    num_requests: int
    prompt_tokens: int
    max_tokens: int = 1
    form: str = "text"  # text or token_ids
    characters_per_token: float = 4.0
    seed: int = 0
    lookaside: bool = False  # ask the address for tickets, and read tokens at the worker


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Latencies of requests and what clients received."""

    p50_s: float
    p99_s: float
    elapsed_s: float
    num_requests: int
    num_tokens: int
    num_messages: int

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def messages_per_s(self) -> float:
        return self.num_messages / self.elapsed_s


def make_text(rng: random.Random, num_characters: int) -> str:
    """Returns words of a Zipf-like frequency, so that common ones repeat as in prose; no two texts are alike."""
    words: list[str] = []
    length = 0
    while length < num_characters:
        rank = int(rng.paretovariate(0.8)) % 20_000
        word_rng = rank * 2654435761
        word = "".join(_SYLLABLES[(word_rng >> shift) % 16] for shift in range(0, 4 + 4 * (rank % 5), 4))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_characters]


def make_requests(load: RouterLoad) -> list[bytes]:
    """Returns serialized requests, no two with a common prefix."""
    rng = random.Random(load.seed)
    length = int(load.prompt_tokens * load.characters_per_token)
    text = make_text(rng, length + 200_000) if load.form == "text" else ""
    requests = []
    for number in range(load.num_requests):
        request = inference_pb2.GenerateRequest()
        request.sampling.max_tokens = load.max_tokens
        request.sampling.ignore_eos = True
        if load.form == "text":
            start = rng.randrange(len(text) - length)
            request.text = f"{number} {text[start : start + length]}"
        else:
            request.token_ids.extend(rng.choices(range(300, 2000), k=load.prompt_tokens))
        requests.append(request.SerializeToString())
    return requests


async def run_load(load: RouterLoad) -> LoadOutcome:
    """Sends all requests. Raises if a request is not answered in full."""
    requests = make_requests(load)
    turns = itertools.count()
    latencies: list[float] = []
    num_tokens = num_messages = 0
    async with grpc.aio.insecure_channel(load.address, options=_LIMITS) as channel:
        generate = channel.unary_stream(_GENERATE) if not load.lookaside else _lookaside(channel)

        async def client() -> None:
            nonlocal num_tokens, num_messages
            while (turn := next(turns)) < len(requests):
                began_s = time.perf_counter()
                received = []
                async for raw in generate(requests[turn], timeout=60):
                    received.append(raw)
                latencies.append(time.perf_counter() - began_s)
                num_messages += len(received)
                num_tokens += sum(len(inference_pb2.GenerateResponse.FromString(raw).token_ids) for raw in received)

        await channel.channel_ready()
        started_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.num_clients)))
        elapsed_s = time.perf_counter() - started_s
    assert num_tokens == load.num_requests * load.max_tokens, f"{num_tokens} tokens came"
    p50_s, p99_s = percentile(latencies, 0.5), percentile(latencies, 0.99)
    return LoadOutcome(p50_s, p99_s, elapsed_s, len(latencies), num_tokens, num_messages)


def _lookaside(router: grpc.aio.Channel) -> Callable[..., AsyncIterator[bytes]]:
    """Returns a stand-in for Generate that streams from workers, with one channel for each, as clients do."""
    route = router.unary_unary(_ROUTE, response_deserializer=inference_pb2.RouteResponse.FromString)
    channels: dict[str, grpc.aio.Channel] = {}

    async def generate(request: bytes, timeout: float) -> AsyncIterator[bytes]:
        routed = await route(request, timeout=timeout)
        channel = channels.get(routed.address)
        if channel is None:
            channel = channels[routed.address] = grpc.aio.insecure_channel(routed.address, options=_LIMITS)
        call = channel.unary_stream(_STREAM, inference_pb2.StreamRequest.SerializeToString)
        async for message in call(inference_pb2.StreamRequest(ticket=routed.ticket), timeout=timeout):
            yield message

    return generate
