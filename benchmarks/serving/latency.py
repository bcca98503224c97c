"""Measures TTFT, ITL and tokens/s of the whole path at 1, 16 and 64 concurrent requests, with the bare-torch floor as
baseline.

One prefill worker, one decode worker (a core each) and the router, as processes; greedy, end-of-sequence ignored. Every
request of a round is sent at once: TTFT at 64 is that of a burst. The floor of ITL is one decode step's matrix products
and KV read on one core, that of TTFT the prompt's matrix products, that of tokens/s the batch over the step's floor.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.floor import step_floor_s
from benchmarks.common.report import Curves, Row, distribution, publish
from benchmarks.common.shapes import BUNDLED, random_llama
from benchmarks.common.timing import print_duration
from benchmarks.serving.deployments import serving_router
from benchmarks.serving.rounds import latency, measure_at, uniform_source
from engine.models.config import ModelConfig
from penstock.bench.driver.deployment_grpc import GrpcEndpoint
from penstock.bench.results.figures import LATENCIES
from penstock.bench.results.result_file import PointResult
from penstock.bench.workloads.schedule import Arrivals
from penstock.config import DecodeConfig

CONCURRENCY = (1, 16, 64)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class LatencyCase:
    """A model and the shape of the requests that it gets."""

    name: str
    model: Path
    prompt_tokens: int
    output_tokens: int


def measure(case: LatencyCase, vocab_size: int) -> dict[int, PointResult]:
    """Returns the requests at each concurrency, all measured on one deployment."""

    async def bursts(address: str) -> dict[int, PointResult]:
        endpoint, found = GrpcEndpoint(address, timeout_s=_TIMEOUT_S), {}
        for count in CONCURRENCY:
            lengths = (case.prompt_tokens,) * 2, (case.output_tokens,) * 2
            source, at_once = uniform_source(count, *lengths), Arrivals(speed=1.0)  # every request has the time 0
            (point,) = await measure_at(endpoint, source, [at_once], vocab_size, seed=count)
            found[count] = point
        await endpoint.close()
        return found

    with serving_router(case.model, DecodeConfig(max_batch_sequences=64), {"num_pages": 2048}) as router:
        return asyncio.run(bursts(router.address))


def rows_of(case: LatencyCase) -> tuple[list[Row], list[Curves]]:
    """Returns the figures with the floor as baseline, and the distributions of TTFT and ITL."""
    config = ModelConfig.from_folder(str(case.model))
    measured = measure(case, config.vocab_size)
    torch.set_num_threads(1)
    dtype = getattr(torch, config.dtype)
    context = case.prompt_tokens + case.output_tokens // 2
    prefill_s = step_floor_s(config, case.prompt_tokens, 1, 0, dtype)
    rows = []
    for count, point in measured.items():
        found = point.figures
        step_s = step_floor_s(config, count, count, count * context, dtype)
        at = f"{case.name}, {count} at once"
        queue_s = prefill_s * (count + 1) / 2  # a burst's median prompt waits for half of the others
        ttft, itl = latency(found, "TTFT"), latency(found, "ITL")
        rows += [
            Row(f"TTFT p50, {at}", ttft.p50_s * 1e3, "ms", "bare-torch prefill", queue_s * 1e3),
            Row(f"ITL p50, {at}", itl.p50_s * 1e3, "ms", "bare-torch step", step_s * 1e3),
            Row(f"ITL p99, {at}", itl.p99_s * 1e3, "ms", "bare-torch step", step_s * 1e3),
            Row(f"output, {at}", found.output_tokens_per_s, "tokens/s", "bare-torch step", count / step_s),
        ]
    curves = [
        distribution(
            f"{name}, {case.name}",
            f"{name}, ms",
            {
                f"{count} at once": [value * 1e3 for each in point.run.requests for value in LATENCIES[name](each)]
                for count, point in measured.items()
            },
        )
        for name in ("TTFT", "ITL")
    ]
    return rows, curves


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.serving.latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    with print_duration():
        cases = [
            LatencyCase("bundled", BUNDLED, prompt_tokens=128, output_tokens=64),
            LatencyCase("135M", random_llama(), prompt_tokens=256, output_tokens=32),
        ]
        found = [rows_of(case) for case in cases]
        rows, curves = [row for rows, _ in found for row in rows], [each for _, curves in found for each in curves]
        workload = "; ".join(f"{case.name}: {case.prompt_tokens} tokens in, {case.output_tokens} out" for case in cases)
        publish("latency", f"{workload}; 1 prefill + 1 decode worker, a core each", rows, curves=curves)


if __name__ == "__main__":
    main()
