"""Where the time to first token of one request goes on an idle system, with its prompt computed remotely or locally.

One prefill and one decode worker, a thread each, beside one decode worker with both threads or with one, and a router;
prompts that no cache holds arrive one after the other. Every stage is a difference of moments that the processes
report in the request's timing, so that the stages of a request add up to the time that its caller sees.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.common.shapes import BUNDLED, random_llama
from benchmarks.serving.deployments import serving_router
from engine.models.config import ModelConfig
from penstock import AsyncClient
from penstock.client.results import Timing
from penstock.config import DecodeConfig
from tests.support.plain_processes import wait_until_followed

_TIMEOUT_S = 60.0
_NUM_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class StageCase:
    """A model and the prompts that it gets."""

    name: str
    model: Path
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """One request: seconds until its first and second token reached the caller, and its timing."""

    first_s: float
    second_s: float
    timing: Timing


async def ask(address: str, prompts: Sequence[Sequence[int]]) -> list[FirstTokens]:
    """Sends the prompts one after the other, two tokens each."""
    found = []
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        for prompt in prompts:
            moments, timing, began_s = [], None, time.perf_counter()
            async for chunk in client.generate(list(prompt), max_tokens=2, temperature=0.0, ignore_eos=True):
                moments += [time.perf_counter() - began_s] * len(chunk.token_ids)
                timing = chunk.timing or timing
            assert timing is not None
            found.append(FirstTokens(moments[0], moments[1], timing))
    return found


def measure(case: StageCase, decode: DecodeConfig, num_threads: int, count: int) -> list[FirstTokens]:
    """Starts a deployment, asks it `count` prompts of random tokens and stops it."""
    rng = random.Random(0)
    vocab_size = ModelConfig.from_folder(str(case.model)).vocab_size
    prompts = [rng.choices(range(3, vocab_size), k=case.prompt_tokens) for _ in range(_NUM_WARM_UP + count)]
    is_colocated = decode.placement == "local"
    engine = {"num_pages": 2048, "num_threads": num_threads}
    with serving_router(case.model, decode, engine, is_colocated=is_colocated) as router:
        wait_until_followed(router, 1 if is_colocated else 2)
        return asyncio.run(ask(router.address, prompts))[_NUM_WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30)
    options = parser.parse_args()
    for case in (
        StageCase("bundled", BUNDLED, 40),
        StageCase("bundled", BUNDLED, 200),
        StageCase("135M", random_llama(), 40),
        StageCase("135M", random_llama(), 256),
    ):
        for name, placement, threads in (("1P+1D", "remote", 1), ("1 thread", "local", 1), ("2 threads", "local", 2)):
            found = measure(case, DecodeConfig(placement=placement), threads, options.requests)
            t = lambda f: median(f(x) for x in found) * 1e3
            print(case.name, case.prompt_tokens, name, "ttft %.2f second %.2f" % (t(lambda x: x.first_s), t(lambda x: x.second_s)),
              {k: round(median(getattr(x.timing, k) for x in found), 2) for k in ("queue_ms","prefill_ms","transfer_ms","first_token_ms","decode_ms")}, flush=True)


if __name__ == "__main__":
    main()
