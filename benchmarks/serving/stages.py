"""Measures which stages the time to first token consists of on an idle system, with prompts computed remotely, split or
locally.

Three deployments with their own routers run at the same time, and the same uncached prompts go to each of them in turn,
one at a time, so that other load on the machine affects all alike: one prefill and one decode worker with a thread
each, whose prompts are all computed remotely or all split, and one decode worker with one thread. The stages are
medians over all prompts of the times that processes report in the request's timing, and of the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import BUNDLED, random_llama
from benchmarks.serving.deployments import serving_router
from engine.models.config import ModelConfig
from penstock import AsyncClient
from penstock.client.results import Timing
from penstock.config import DecodeConfig
from tests.support.plain_processes import wait_until_followed

Place = Literal["local", "remote", "split"]
PLACES: tuple[Place, ...] = ("local", "remote", "split")
_TIMEOUT_S = 60.0
_NUM_WARM_UP = 6


@dataclass(frozen=True, slots=True)
class StageCase:
    """A model and the length of the prompts that it gets."""

    name: str
    model: Path
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """A request: milliseconds until its first two tokens reached the caller, and its timing."""

    first_ms: float
    second_ms: float
    timing: Timing

    @property
    def stages(self) -> dict[str, float]:
        """The stages of the first token, which add up to its time, and the time from it to the second."""
        timing = self.timing
        worker_ms = timing.decode_first_token_ms
        is_split = bool(timing.prices) and timing.prices[0].place == "split"
        landing_ms = timing.transfer_ms if is_split else 0.0
        return {
            "TTFT": self.first_ms,
            "client and router": self.first_ms - worker_ms,
            "queue": timing.queue_ms,
            "prefill": timing.prefill_ms,
            "transfer before the rest of a split prompt": landing_ms,
            "calls and wake-ups": worker_ms - timing.queue_ms - timing.prefill_ms - landing_ms,
            "exposed transfer": timing.transfer_ms,
            "first to second token": self.second_ms - self.first_ms,
        }


async def ask(client: AsyncClient, prompt: Sequence[int]) -> FirstTokens:
    """Sends one prompt for two tokens."""
    moments: list[float] = []
    timing, began_s = None, time.perf_counter()
    async for chunk in client.generate(list(prompt), max_tokens=2, temperature=0.0, ignore_eos=True):
        moments += [(time.perf_counter() - began_s) * 1e3] * len(chunk.token_ids)
        timing = chunk.timing or timing
    assert timing is not None
    return FirstTokens(moments[0], moments[1], timing)


async def ask_in_turn(addresses: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[list[FirstTokens]]:
    """Sends each prompt to each address, one request at a time; returns the outcomes by address."""
    found: list[list[FirstTokens]] = [[] for _ in addresses]
    clients = [AsyncClient(address, timeout_s=_TIMEOUT_S) for address in addresses]
    try:
        for prompt in prompts:
            for client, outcomes in zip(clients, found, strict=True):
                outcomes.append(await ask(client, prompt))
    finally:
        for client in clients:
            await client.close()
    return [outcomes[_NUM_WARM_UP:] for outcomes in found]


def measure(case: StageCase, count: int) -> dict[Place, list[FirstTokens]]:
    """Starts the deployments, asks each of them `count` prompts of random tokens and stops them."""
    rng = random.Random(0)
    vocab_size = ModelConfig.from_folder(str(case.model)).vocab_size
    prompts = [rng.choices(range(3, vocab_size), k=case.prompt_tokens) for _ in range(_NUM_WARM_UP + count)]
    engine = {"num_pages": 1024, "num_threads": 1}
    with ExitStack() as stack:
        routers = []
        for place in PLACES:
            is_local = place == "local"
            config = DecodeConfig(placement=place)
            router = stack.enter_context(serving_router(case.model, config, engine, "auto", is_local, num_threads=1))
            wait_until_followed(router, 1 if is_local else 2)
            routers.append(router.address)
        return dict(zip(PLACES, asyncio.run(ask_in_turn(routers, prompts)), strict=True))


def rows_of(case: StageCase, found: dict[Place, list[FirstTokens]]) -> list[Row]:
    """Returns each stage with that of a local prefill as baseline, and what remote prefills add to it."""
    at = f"{case.name}, {case.prompt_tokens} tokens"
    middle = {
        place: {name: median(each.stages[name] for each in outcomes) for name in outcomes[0].stages}
        for place, outcomes in found.items()
    }
    rows = [
        Row(f"{name}, {at}, {place}", value, "ms", "local", middle["local"][name])
        for place in PLACES[1:]
        for name, value in middle[place].items()
    ]
    for place in PLACES[1:]:
        pairs = zip(found[place], found["local"], strict=True)
        added = median(placed.first_ms - local.first_ms for placed, local in pairs)
        rows.append(Row(f"TTFT beyond local, {at}, {place}", added, "ms"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.stages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=40)
    options = parser.parse_args()
    cases = [
        StageCase("bundled", BUNDLED, 40),
        StageCase("bundled", BUNDLED, 200),
        StageCase("135M", random_llama(), 64),
    ]
    rows = [row for case in cases for row in rows_of(case, measure(case, options.requests))]
    publish("stages", f"{options.requests} prompts, one at a time, a thread a worker", rows)


if __name__ == "__main__":
    main()
