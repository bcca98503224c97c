"""TTFT, ITL and tokens/s of the whole path at 1, 16 and 64 concurrent requests, beside the bare-torch floor.

One prefill worker, one decode worker (a core each) and the router, as processes; greedy, end-of-sequence ignored. Every
request of a round is sent at once: TTFT at 64 is that of a burst. The floor of ITL is one decode step's matrix products
and KV read on one core, that of TTFT the prompt's matrix products, that of tokens/s the batch over the step's floor.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.floor import step_floor
from benchmarks.report import Row, percentile, publish
from benchmarks.serving_load import Outcome, Plan, run
from benchmarks.shapes import random_llama
from cluster.processes import Deployment
from engine.model_config import ModelConfig
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.types import Role

CONCURRENCY = (1, 16, 64)
BUNDLED = Path(__file__).resolve().parent.parent / "models" / "penstock-tiny"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the requests that it is asked."""

    name: str
    model: Path
    prompt_tokens: int
    output_tokens: int
    num_pages: int


def measure(shape: Shape) -> dict[int, Outcome]:
    """Outcome at each concurrency, all on one deployment."""
    config = ModelConfig.from_folder(str(shape.model))

    def worker(role: Role) -> WorkerConfig:
        return WorkerConfig(
            worker_id=f"{role.value}-0",
            role=role,
            engine=EngineConfig(model=str(shape.model), num_threads=1, num_pages=shape.num_pages),
            decode=DecodeConfig(max_batch_sequences=64),
        )

    rng = random.Random(0)

    def burst(count: int) -> list[Plan]:
        prompts = (rng.choices(range(3, config.vocab_size), k=shape.prompt_tokens) for _ in range(count))
        return [Plan(0.0, prompt, shape.output_tokens) for prompt in prompts]

    with Deployment() as deployment:
        processes = deployment.start_workers([worker(Role.PREFILL), worker(Role.DECODE)])
        addresses = tuple(process.address for process in processes)
        router = deployment.start_router(
            RouterConfig(model=str(shape.model), grpc_port=0, http_port=0, workers=addresses)
        )
        asyncio.run(run(router.address, burst(3)))
        return {count: asyncio.run(run(router.address, burst(count))) for count in CONCURRENCY}


def rows_of(shape: Shape) -> list[Row]:
    outcomes = measure(shape)
    torch.set_num_threads(1)
    config = ModelConfig.from_folder(str(shape.model))
    dtype = getattr(torch, config.dtype)
    context = shape.prompt_tokens + shape.output_tokens // 2
    prefill_s = step_floor(config, shape.prompt_tokens, 1, 0, dtype).step_s
    rows = []
    for count, outcome in outcomes.items():
        step_s = step_floor(config, count, count, count * context, dtype).step_s
        at = f"{shape.name}, {count} at once"
        queue_s = prefill_s * (count + 1) / 2  # a burst's median prompt waits for half of the others
        rows += [
            Row(f"TTFT p50, {at}", percentile(outcome.ttft, 0.5) * 1e3, "ms", "bare-torch prefill", queue_s * 1e3),
            Row(f"ITL p50, {at}", percentile(outcome.itl, 0.5) * 1e3, "ms", "bare-torch step", step_s * 1e3),
            Row(f"ITL p99, {at}", percentile(outcome.itl, 0.99) * 1e3, "ms", "bare-torch step", step_s * 1e3),
            Row(f"output, {at}", outcome.num_tokens / outcome.elapsed_s, "tokens/s", "bare-torch step", count / step_s),
        ]
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    started_s = time.perf_counter()
    shapes = [
        Shape("bundled", BUNDLED, prompt_tokens=128, output_tokens=64, num_pages=2048),
        Shape("135M", random_llama(), prompt_tokens=256, output_tokens=32, num_pages=2048),
    ]
    rows = [row for shape in shapes for row in rows_of(shape)]
    workload = "; ".join(f"{s.name}: {s.prompt_tokens} tokens in, {s.output_tokens} out" for s in shapes)
    publish("latency", f"{workload}; 1 prefill + 1 decode worker, a core each", rows)
    print(f"took {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
