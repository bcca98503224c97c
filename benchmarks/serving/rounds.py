"""Measures deployments with Penstock's own load generator: random prompts that share nothing, exact lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.serving.deployments import SERVED_MODEL
from benchmarks.serving.vllm_server import VllmPrefill
from penstock.bench.driver.endpoint import Endpoint
from penstock.bench.driver.openai_http import OpenAiEndpoint, RequestForm
from penstock.bench.measure import SweepSpec, measure
from penstock.bench.results.figures import RunFigures
from penstock.bench.results.quantiles import Quantiles
from penstock.bench.results.result_file import PointResult
from penstock.bench.workloads.plan import Draft, PromptBlocks, Source
from penstock.bench.workloads.schedule import Arrivals

_TIMEOUT_S = 120.0


def uniform_source(count: int, prompts: tuple[int, int], answers: tuple[int, int], seed: int = 0) -> Source:
    """Returns requests whose lengths are uniform between the given bounds."""
    rng = random.Random(seed)
    drafts = []
    for number in range(count):
        length = rng.randint(*prompts)
        drafts.append(Draft(PromptBlocks(((number, 1),), length, length), rng.randint(*answers)))
    return Source("uniform", tuple(drafts))


async def measure_http(
    address: str,
    source: Source,
    points: Sequence[Arrivals],
    vocab_size: int,
    vllm_prefill: str = "",
    seed: int = 0,
) -> list[PointResult]:
    """Measures streams of `/v1/completions`; prompts go to `vllm_prefill` first, if given, as in vLLM's proxies."""
    prefill = VllmPrefill(vllm_prefill) if vllm_prefill else None
    form = RequestForm(SERVED_MODEL)
    endpoint = OpenAiEndpoint(address, form, timeout_s=_TIMEOUT_S, prepare=prefill.prepare if prefill else None)
    try:
        return await measure_at(endpoint, source, points, vocab_size, seed)
    finally:
        await endpoint.close()
        if prefill is not None:
            await prefill.close()


async def measure_at(
    endpoint: Endpoint, source: Source, points: Sequence[Arrivals], vocab_size: int, seed: int = 0
) -> list[PointResult]:
    """Measures the points. Raises RuntimeError if a request was not answered in full: compared figures must be of the
    same work.
    """
    spec = SweepSpec(source, points, seed=seed, token_ids=range(3, vocab_size), is_quiet=True)
    found = await measure(spec, endpoint)
    for point in found:
        if point.figures.errors:
            raise RuntimeError(f"at {point.name}: {point.figures.errors}")
        for warning in point.figures.generator.warnings:
            print(f"{point.name}: {warning}", flush=True)
    return found


def latency(figures: RunFigures, name: str) -> Quantiles:
    """Returns the distribution of a latency that was measured."""
    found = figures.latencies[name]
    assert found is not None, f"no {name} was measured"
    return found
