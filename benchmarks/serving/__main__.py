"""Compares disaggregated with colocated serving, and both with vLLM, on two cores.

Disaggregated is one prefill and one decode worker with a core each, colocated is one worker with both cores; vLLM runs
in the same two arrangements if its interpreter is named (`benchmarks/common/vllm_process.py`).

64 requests arrive as a Poisson process; prompts are 64 to 1024 random tokens, outputs 16 to 96 with end-of-sequence
ignored, greedy, on the 135M shape in bf16, as streams of OpenAI's HTTP API. The client, the router and the workers
share the machine's two cores. The deployments run one after another with the same prompts at the same times; three
requests that do not count precede each point.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.common.report import Curves, Row, distribution, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from benchmarks.common.vllm_process import Vllm, own_cores, parse_with_vllm
from benchmarks.serving.deployments import serving_router
from benchmarks.serving.rounds import latency, measure_http, uniform_source
from benchmarks.serving.vllm_server import VllmServer
from penstock.bench.results.figures import LATENCIES, RunFigures
from penstock.bench.results.result_file import PointResult
from penstock.bench.workloads.schedule import Arrivals
from penstock.config import DecodeConfig

NUM_REQUESTS = 64
RATES = (2.0, 4.0)  # requests a second
MAX_SEQUENCES, MAX_CONTEXT = 64, 2048
SPLIT, COLOCATED, VLLM, VLLM_SPLIT = "1P+1D", "colocated", "vLLM colocated", "vLLM 1P+1D"
METRICS = (("TTFT p50", "ms"), ("TTFT p99", "ms"), ("ITL p50", "ms"), ("ITL p99", "ms"), ("output", "tokens/s"))

Figures = Mapping[str, Mapping[float, tuple[float, ...]]]  # values of METRICS, by deployment and rate


@dataclass(frozen=True, slots=True)
class Server:
    """The address that requests are sent to."""

    address: str
    vllm_prefill: str = ""  # vLLM's prefill server, which gets prompts first


@contextmanager
def penstock_server(is_colocated: bool, transport: str) -> Iterator[Server]:
    decode = DecodeConfig(max_batch_sequences=MAX_SEQUENCES, placement="local" if is_colocated else "auto")
    with serving_router(random_llama(), decode, {"num_pages": 6000}, transport, is_colocated) as router:
        yield Server(router.http)


@contextmanager
def vllm_server(vllm: Vllm) -> Iterator[Server]:
    with VllmServer(vllm, random_llama(), own_cores(2), MAX_SEQUENCES, MAX_CONTEXT) as server:
        yield Server(server.address)


@contextmanager
def vllm_pair(vllm: Vllm) -> Iterator[Server]:
    """Starts the two servers one after another, so that the second finds the code that the first has compiled."""
    first, second = ([core] for core in own_cores(2))
    with (
        VllmServer(vllm, random_llama(), first, MAX_SEQUENCES, MAX_CONTEXT, is_paired=True) as prefill,
        VllmServer(vllm, random_llama(), second, MAX_SEQUENCES, MAX_CONTEXT, is_paired=True) as decode,
    ):
        yield Server(decode.address, prefill.address)


def measure(
    name: str, serving: AbstractContextManager[Server], rates: Sequence[float], num_requests: int
) -> dict[float, PointResult]:
    """Starts a deployment, measures each rate with different, uncached prompts, and stops it."""

    source = uniform_source(num_requests, (64, 1024), (16, 96))
    points = [Arrivals(rate=rate) for rate in rates]
    with serving as server:
        sweep = measure_http(server.address, source, points, LLAMA_135M["vocab_size"], server.vllm_prefill)
        found = dict(zip(rates, asyncio.run(sweep), strict=True))
    for rate, point in found.items():
        print(name, rate, [round(figure, 1) for figure in metrics_of(point.figures)], flush=True)
    return found


def distributions(found: Mapping[str, Mapping[float, PointResult]]) -> Iterator[Curves]:
    """Yields the distributions of TTFT and ITL at each rate, a line for each deployment."""
    for rate in found[SPLIT]:
        for name in ("TTFT", "ITL"):
            values = {
                deployment: [value * 1e3 for each in of_rate[rate].run.requests for value in LATENCIES[name](each)]
                for deployment, of_rate in found.items()
            }
            yield distribution(f"{name} at {rate:g} requests/s", f"{name}, ms", values)


def metrics_of(figures: RunFigures) -> tuple[float, ...]:
    """Returns the figures of METRICS."""
    ttft, itl = latency(figures, "TTFT"), latency(figures, "ITL")
    found_s = (ttft.p50_s, ttft.p99_s, itl.p50_s, itl.p99_s)
    return (*(value_s * 1e3 for value_s in found_s), figures.output_tokens_per_s)


def peers(vllm: Vllm | None) -> dict[str, AbstractContextManager[Server]]:
    if vllm is None:
        return {}
    return {VLLM: vllm_server(vllm), **({VLLM_SPLIT: vllm_pair(vllm)} if vllm.has_nixl else {})}


def rows_of(found: Figures) -> list[Row]:
    """Compares Penstock's deployments with each other, and with those of vLLM that were measured."""
    pairs = [(SPLIT, COLOCATED), (COLOCATED, VLLM), (SPLIT, VLLM), (SPLIT, VLLM_SPLIT)]
    return [
        Row(f"{metric} at {rate:g}/s, {own}", found[own][rate][index], unit, other, found[other][rate][index])
        for rate in found[SPLIT]
        for index, (metric, unit) in enumerate(METRICS)
        for own, other in pairs
        if other in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--skip", nargs="+", default=[], choices=[VLLM, VLLM_SPLIT], help="deployments to leave out")
    options, vllm, vllm_description = parse_with_vllm(parser)
    servers = {COLOCATED: penstock_server(True, options.transport), SPLIT: penstock_server(False, options.transport)}
    found = {name: measure(name, server, options.rates, options.requests) for name, server in servers.items()}
    for name, server in peers(vllm).items():
        if name in options.skip:
            continue
        try:
            found[name] = measure(name, server, options.rates, options.requests)
        except (RuntimeError, TimeoutError) as error:  # our figures are valid without it
            print(f"skipped {name}: {error!r}", flush=True)
    shape = f"135M Llama shape, bf16, transport {options.transport}"
    workload = f"{options.requests} requests, {shape}; compared with {vllm_description}"
    figures = {name: {rate: metrics_of(point.figures) for rate, point in each.items()} for name, each in found.items()}
    publish("serving", workload, rows_of(figures), curves=list(distributions(found)))


if __name__ == "__main__":
    main()
