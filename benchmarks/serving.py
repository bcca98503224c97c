"""Disaggregated beside colocated: one prefill and one decode worker with a core each, one worker with both cores.

64 requests arrive as a Poisson process; prompts are 64 to 1024 random tokens, outputs 16 to 96 with end-of-sequence
ignored, greedy, on the 135M shape in bf16. The client, the router and the workers share the machine's two cores. The
two deployments run one after the other with the same arrivals; each first answers three requests that do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

from benchmarks.report import Row, percentile, publish
from benchmarks.shapes import random_llama
from cluster.processes import Deployment
from penstock import AsyncClient
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from penstock.types import Role

NUM_REQUESTS = 64
RATES = (2.0, 4.0)  # requests a second
# vLLM on two cores of the same kind, for orientation: (TTFT p50, TTFT p99, ITL p50, ITL p99 in ms, tokens/s)
VLLM_COLOCATED = {2.0: (178, 941, 36, 308, 98), 4.0: (301, 1205, 51, 481, 175)}
VLLM_DISAGGREGATED = {2.0: (2921, 7572, 132, 188, 80)}
_TIMEOUT_S = 120.0


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


def make_plans(rate: float, num_requests: int, vocab_size: int, seed: int = 0) -> list[Plan]:
    rng = random.Random(seed)
    plans, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        prompt = rng.choices(range(3, vocab_size), k=rng.randint(64, 1024))
        plans.append(Plan(now_s, prompt, rng.randint(16, 96)))
    return plans


async def run(address: str, plans: list[Plan]) -> Outcome:
    """Sends every request at its time and records when its tokens come."""
    outcome = Outcome()
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        started_s = time.perf_counter()
        await asyncio.gather(*(_one(client, plan, started_s, outcome) for plan in plans))
        outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


async def _one(client: AsyncClient, plan: Plan, started_s: float, outcome: Outcome) -> None:
    await asyncio.sleep(max(0.0, started_s + plan.arrival_s - time.perf_counter()))
    sent_s = last_s = time.perf_counter()
    received = 0
    stream = client.generate(plan.prompt, max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=True)
    async for chunk in stream:
        if not chunk.token_ids:
            continue
        now_s = time.perf_counter()
        if received == 0:
            outcome.ttft.append(now_s - sent_s)
        else:
            outcome.itl.append(now_s - last_s)
        last_s, received = now_s, received + len(chunk.token_ids)
    assert received == plan.max_tokens, f"{received} tokens, {plan.max_tokens} asked for"
    outcome.num_tokens += received


def measure(disaggregated: bool, rate: float, transport: str, num_requests: int) -> Outcome:
    """One deployment from start to stop."""
    model = str(random_llama())
    vocab_size = 32000

    def worker(name: str, role: Role, num_threads: int) -> WorkerConfig:
        return WorkerConfig(
            worker_id=name,
            role=role,
            engine=EngineConfig(model=model, num_threads=num_threads, num_pages=6000),
            decode=DecodeConfig(placement="auto" if disaggregated else "local"),
            transfer=TransferConfig.model_validate({"transport": transport}),
        )

    if disaggregated:
        configs = [worker("prefill-0", Role.PREFILL, 1), worker("decode-0", Role.DECODE, 1)]
    else:
        configs = [worker("colocated-0", Role.DECODE, 2)]
    with Deployment() as deployment:
        workers = deployment.start_workers(configs)
        addresses = tuple(process.address for process in workers)
        router = deployment.start_router(RouterConfig(model=model, grpc_port=0, http_port=0, workers=addresses))
        warm_up = make_plans(rate=1e9, num_requests=3, vocab_size=vocab_size, seed=1)
        asyncio.run(run(router.address, warm_up))
        return asyncio.run(run(router.address, make_plans(rate, num_requests, vocab_size)))


METRICS = (("TTFT p50", "ms"), ("TTFT p99", "ms"), ("ITL p50", "ms"), ("ITL p99", "ms"), ("output", "tokens/s"))


def compare(rate: float, transport: str, num_requests: int) -> list[Row]:
    colocated = measure(False, rate, transport, num_requests).figures()
    disaggregated = measure(True, rate, transport, num_requests).figures()
    rows = []
    for index, (metric, unit) in enumerate(METRICS):
        name = f"{metric} at {rate:g}/s"
        rows.append(Row(f"{name}, 1P+1D", disaggregated[index], unit, "Penstock colocated", colocated[index]))
        for label, known, ours in (
            ("vLLM 1P+1D", VLLM_DISAGGREGATED, disaggregated),
            ("vLLM colocated", VLLM_COLOCATED, disaggregated),
            ("vLLM colocated", VLLM_COLOCATED, colocated),
        ):
            if rate in known:
                mode = "colocated" if ours is colocated else "1P+1D"
                rows.append(Row(f"{name}, {mode}", ours[index], unit, f"{label} (quoted)", known[rate][index]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    options = parser.parse_args()
    rows = [row for rate in options.rates for row in compare(rate, options.transport, options.requests)]
    publish("serving", f"{options.requests} requests, 135M Llama shape, bf16, transport {options.transport}", rows)


if __name__ == "__main__":
    main()
