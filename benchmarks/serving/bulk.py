"""Measures what a large batch beside interactive requests changes for these, and how much of it gets done meanwhile.

One colocated worker has a core, and the router and the load generator share the other. Rounds without and with a batch
alternate; both have the same arrivals and lengths, with other random prompts. Interactive requests are a Poisson
process of streams in the lane interactive, on the 135M shape, greedy, end-of-sequence ignored. The batch is a file of
/v1/batches whose lines never run out; it is cancelled after its round. Its tokens/s are those of its finished lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.common.report import Row, distribution, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from benchmarks.common.timing import print_duration
from benchmarks.common.vllm_process import own_cores
from benchmarks.serving.deployments import SERVED_MODEL
from benchmarks.serving.rounds import measure_at
from penstock.bench.driver.openai_http import OpenAiEndpoint, RequestForm
from penstock.bench.results.figures import LATENCIES
from penstock.bench.results.quantiles import Quantiles
from penstock.bench.workloads.plan import Draft, PromptBlocks, Source
from penstock.bench.workloads.schedule import Arrivals
from penstock.config import BatchConfig, DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.types import Lane, Role
from tests.support.plain_processes import Deployment, wait_until_followed

PROMPTS, ANSWERS = (32, 128), (16, 48)  # tokens of interactive requests
BULK_PROMPT, BULK_ANSWER = 96, 32
NUM_LINES = 2000
_TIMEOUT_S = 120.0
_KINDS = ("TTFT", "ITL")


@dataclass(slots=True)
class Measured:
    """The latencies of interactive requests, in seconds, and the batch's progress, over all rounds of one kind."""

    latencies: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    bulk_tokens: int = 0
    elapsed_s: float = 0.0


def source(count: int, seed: int, first_block: int) -> Source:
    """Returns requests whose lengths depend on the seed, and whose texts depend on the number of their first block."""
    rng, drafts = random.Random(seed), []
    for number in range(count):
        length = rng.randint(*PROMPTS)
        prompt = PromptBlocks(((first_block + number, 1),), length, length)
        drafts.append(Draft(prompt, rng.randint(*ANSWERS), lane=Lane.INTERACTIVE))
    return Source("interactive", tuple(drafts))


def batch_file(seed: int) -> bytes:
    """Returns the lines of a batch of random prompts."""
    rng, lines = random.Random(seed), []
    for number in range(NUM_LINES):
        prompt = rng.choices(range(3, LLAMA_135M["vocab_size"]), k=BULK_PROMPT)
        body = {"model": SERVED_MODEL, "prompt": prompt, "max_tokens": BULK_ANSWER, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


class RunningBatch:
    """A batch at the router."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def num_completed(self) -> int:
        """Returns how many lines have an answer."""
        async with self._session.get(self._url) as response:
            return int((await response.json())["request_counts"]["completed"])

    async def cancel(self) -> None:
        """Returns once no line is in flight any more."""
        async with self._session.post(f"{self._url}/cancel") as response:
            response.raise_for_status()
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                async with self._session.get(self._url) as response:
                    if (await response.json())["status"] == "cancelled":
                        return
                await asyncio.sleep(0.2)


@asynccontextmanager
async def running_batch(address: str, seed: int) -> AsyncIterator[RunningBatch]:
    """Runs a batch beside the caller, from its first finished line on."""
    async with aiohttp.ClientSession() as session:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", batch_file(seed), filename="lines.jsonl")
        async with session.post(f"{address}/v1/files", data=form) as response:
            response.raise_for_status()
            file_id = (await response.json())["id"]
        wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
        async with session.post(f"{address}/v1/batches", json=wanted) as response:
            response.raise_for_status()
            batch = RunningBatch(session, f"{address}/v1/batches/{(await response.json())['id']}")
        async with asyncio.timeout(_TIMEOUT_S):
            while not await batch.num_completed():  # noqa: ASYNC110 - the API has no event
                await asyncio.sleep(0.2)
        try:
            yield batch
        finally:
            await batch.cancel()


async def measure_round(endpoint: OpenAiEndpoint, requests: Source, rate: float, seed: int, into: Measured) -> None:
    started_s = time.monotonic()
    (point,) = await measure_at(endpoint, requests, [Arrivals(rate=rate)], LLAMA_135M["vocab_size"], seed)
    into.elapsed_s += time.monotonic() - started_s
    for request in point.run.requests:
        for kind in _KINDS:
            into.latencies[kind] += LATENCIES[kind](request)


@dataclass(slots=True)
class Pooled:
    """Figures of all rounds, including those of earlier runs."""

    without: Measured = field(default_factory=Measured)
    beside: Measured = field(default_factory=Measured)
    num_rounds: int = 0

    @classmethod
    def read(cls, path: Path | None) -> Pooled:
        """Returns what earlier runs have left in the file; nothing if there is none."""
        if path is None or not path.exists():
            return cls()
        found = json.loads(path.read_text())
        return cls(Measured(**found["without"]), Measured(**found["beside"]), found["num_rounds"])


async def measure(address: str, num_rounds: int, num_requests: int, rate: float, into: Pooled) -> None:
    """Adds rounds to what was measured."""
    without, beside, first = into.without, into.beside, into.num_rounds
    endpoint = OpenAiEndpoint(address, RequestForm(SERVED_MODEL), timeout_s=_TIMEOUT_S)
    try:
        for number in range(first, first + num_rounds):
            for kind, found in enumerate((without, beside) if number % 2 == 0 else (beside, without)):
                requests = source(num_requests, number, (2 * number + kind) * num_requests)
                if found is without:
                    await measure_round(endpoint, requests, rate, number, found)
                    continue
                async with running_batch(f"http://{address}", number) as batch:
                    before = await batch.num_completed()
                    await measure_round(endpoint, requests, rate, number, found)
                    found.bulk_tokens += (await batch.num_completed() - before) * BULK_ANSWER
            into.num_rounds += 1
    finally:
        await endpoint.close()


def serve_and_measure(num_rounds: int, num_requests: int, rate: float, into: Pooled) -> None:
    model = str(random_llama())
    engine = EngineConfig(model=model, num_pages=4000, num_threads=1)
    worker = WorkerConfig(worker_id="decode-0", role=Role.DECODE, engine=engine, decode=DecodeConfig(placement="local"))
    first, second = own_cores(2)
    os.sched_setaffinity(0, {second})
    with tempfile.TemporaryDirectory() as folder, Deployment() as deployment:
        addresses = tuple(process.address for process in deployment.start_workers([worker], [first], fresh=True))
        batches = BatchConfig(folder=folder)
        router = deployment.start_router(
            RouterConfig(
                model=model, served_model=SERVED_MODEL, grpc_port=0, http_port=0, workers=addresses, batches=batches
            ),
            second,
            fresh=True,
        )
        wait_until_followed(router, 1)
        asyncio.run(measure(router.http, num_rounds, num_requests, rate, into))


def rows_of(without: Measured, beside: Measured) -> list[Row]:
    """Returns the percentiles beside a batch, with those without one as baselines, and the batch's tokens/s."""
    rows = []
    for kind in _KINDS:
        found, base = Quantiles.of(beside.latencies[kind]), Quantiles.of(without.latencies[kind])
        assert found is not None
        assert base is not None
        for name, value, before in (("p50", found.p50_s, base.p50_s), ("p99", found.p99_s, base.p99_s)):
            rows.append(Row(f"{kind} {name} beside a batch", value * 1e3, "ms", "no batch", before * 1e3))
    return [*rows, Row("output of the batch", beside.bulk_tokens / beside.elapsed_s, "tokens/s")]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.bulk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind")
    parser.add_argument("--requests", type=int, default=24, help="interactive requests of a round")
    parser.add_argument("--rate", type=float, default=1.0, help="interactive requests a second")
    parser.add_argument("--pool", type=Path, metavar="FILE", help="adds this run's rounds to those in FILE, kept there")
    options = parser.parse_args()
    with print_duration():
        pooled = Pooled.read(options.pool)
        serve_and_measure(options.rounds, options.requests, options.rate, pooled)
        if options.pool is not None:
            options.pool.write_text(json.dumps(asdict(pooled)))
        without, beside = pooled.without, pooled.beside
        curves = [
            distribution(
                f"{kind} of interactive requests",
                f"{kind}, ms",
                {
                    name: [value * 1e3 for value in each.latencies[kind]]
                    for name, each in (("no batch", without), ("beside a batch", beside))
                },
            )
            for kind in _KINDS
        ]
        workload = (
            f"{pooled.num_rounds} rounds of {options.requests} interactive requests at {options.rate:g}/s without and "
            f"with a batch; {PROMPTS[0]}-{PROMPTS[1]} tokens in, {ANSWERS[0]}-{ANSWERS[1]} out; lines of "
            f"{BULK_PROMPT} in, {BULK_ANSWER} out; one worker with one core"
        )
        publish("bulk", workload, rows_of(without, beside), curves=curves)


if __name__ == "__main__":
    main()
