"""Sends many streaming HTTP requests at once to a running deployment, together with clients that leave after one token.

`python -m benchmarks.router.burst --url http://127.0.0.1:8000 --requests 1000` prints how many were refused, how many
answers have their full length, and how long all of them took. With `--leavers N`, N more clients read one token and
disconnect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

from simulator.report import percentile


@dataclass(slots=True)
class Answer:
    """A client's view of its request."""

    status: int = 0
    finish_reason: str | None = None
    num_tokens: int = 0
    first_s: float | None = None  # since the burst began
    ended_s: float = 0.0
    problem: str = ""

    @property
    def outcome(self) -> str:
        if self.status != 200:
            return f"HTTP {self.status}" if self.status else self.problem
        return self.finish_reason or self.problem or "cut off"


async def ask(url: str, body: dict[str, object], begun_s: float, *, leaves: bool = False) -> Answer:
    """Sends one request over its own connection and reads its events; `leaves` disconnects at the first token."""
    parts, answer = urlsplit(url), Answer()
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)
            answer.status = int((await reader.readline()).split()[1])
            async for line in reader:
                if line.startswith(b"event: error"):
                    answer.problem = (await reader.readline()).decode()
                elif line.startswith(b"data: {"):
                    _read(json.loads(line[6:]), answer, begun_s)
                    if leaves:
                        break
        finally:
            writer.close()
    except (OSError, IndexError, ValueError) as error:
        answer.problem = f"{type(error).__name__}: {error}"
    answer.ended_s = time.monotonic() - begun_s
    return answer


def _read(event: dict[str, object], answer: Answer, begun_s: float) -> None:
    if answer.first_s is None:
        answer.first_s = time.monotonic() - begun_s
    for choice in event.get("choices") or ():  # type: ignore[attr-defined]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    if usage := event.get("usage"):
        answer.num_tokens = usage["completion_tokens"]  # type: ignore[index]


async def burst(arguments: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:
    """Returns the answers of those that stay and of those that leave."""
    rng = random.Random(arguments.seed)
    begun_s = time.monotonic()

    def body() -> dict[str, object]:
        return {
            "prompt": [rng.randrange(300, 2000) for _ in range(arguments.prompt_tokens)],
            "max_tokens": arguments.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    stay = [ask(arguments.url, body(), begun_s) for _ in range(arguments.requests)]
    leave = [ask(arguments.url, body(), begun_s, leaves=True) for _ in range(arguments.leavers)]
    mixed = [*enumerate(stay), *enumerate(leave, len(stay))]
    rng.shuffle(mixed)
    answers = await asyncio.gather(*(coroutine for _, coroutine in mixed))
    by_rank = dict(zip((rank for rank, _ in mixed), answers, strict=True))
    ordered = [by_rank[rank] for rank in range(len(mixed))]
    return ordered[: len(stay)], ordered[len(stay) :]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.burst", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--leavers", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    stayed, left = asyncio.run(burst(arguments))
    whole = sum(answer.num_tokens == arguments.output_tokens for answer in stayed)
    print(f"{len(stayed)} stayed: {dict(Counter(answer.outcome for answer in stayed))}, {whole} of full length")
    if left:
        print(f"{len(left)} left: {sum(answer.first_s is not None for answer in left)} with a first token")
    firsts = [answer.first_s for answer in stayed if answer.first_s is not None]
    if firsts:
        tail = " ".join(f"p{int(100 * share)} {percentile(firsts, share):.1f}" for share in (0.5, 0.99))
        print(f"first token s: {tail}; all ended after {max(answer.ended_s for answer in stayed):.1f} s")
    for problem, count in Counter(answer.problem for answer in (*stayed, *left) if answer.problem).most_common(5):
        print(f"{count} x {problem}")
    return 0 if whole == len(stayed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
