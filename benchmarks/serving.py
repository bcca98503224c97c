"""Disaggregated beside colocated, and both beside vLLM: one prefill and one decode worker with a core each, one worker
with both cores, and the same two of vLLM's where its interpreter is named (`benchmarks/vllm_process.py`).

64 requests arrive as a Poisson process; prompts are 64 to 1024 random tokens, outputs 16 to 96 with end-of-sequence
ignored, greedy, on the 135M shape in bf16, as streams of OpenAI's HTTP API. The client, the router and the workers
share the machine's two cores. The deployments run one after the other with the same prompts at the same times; each
first answers three requests that do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.report import Row, publish
from benchmarks.serving_load import Outcome, make_plans, run_http
from benchmarks.shapes import LLAMA_135M, random_llama
from benchmarks.vllm_process import NoVllm, Vllm, add_option, find_vllm, own_cores
from benchmarks.vllm_server import NAME, VllmServer
from cluster.processes import Deployment
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from penstock.types import Role

NUM_REQUESTS = 64
RATES = (2.0, 4.0)  # requests a second
MAX_SEQUENCES, MAX_CONTEXT = 64, 2048
SPLIT, COLOCATED, VLLM, VLLM_SPLIT = "1P+1D", "colocated", "vLLM colocated", "vLLM 1P+1D"
METRICS = (("TTFT p50", "ms"), ("TTFT p99", "ms"), ("ITL p50", "ms"), ("ITL p99", "ms"), ("output", "tokens/s"))

Figures = Mapping[str, Mapping[float, tuple[float, ...]]]  # as METRICS, by deployment and rate


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    address: str
    model: str
    vllm_prefill: str = ""  # where prompts go first


@contextmanager
def penstock_server(disaggregated: bool, transport: str) -> Iterator[Server]:
    model = str(random_llama())

    def worker(name: str, role: Role, num_threads: int) -> WorkerConfig:
        return WorkerConfig(
            worker_id=name,
            role=role,
            engine=EngineConfig(model=model, num_threads=num_threads, num_pages=6000),
            decode=DecodeConfig(max_batch_sequences=MAX_SEQUENCES, placement="auto" if disaggregated else "local"),
            transfer=TransferConfig.model_validate({"transport": transport}),
        )

    if disaggregated:
        configs = [worker("prefill-0", Role.PREFILL, 1), worker("decode-0", Role.DECODE, 1)]
    else:
        configs = [worker("colocated-0", Role.DECODE, 2)]
    with Deployment() as deployment:
        workers = deployment.start_workers(configs)
        addresses = tuple(process.address for process in workers)
        config = RouterConfig(model=model, served_model=NAME, grpc_port=0, http_port=0, workers=addresses)
        yield Server(deployment.start_router(config).http, NAME)


@contextmanager
def vllm_server(vllm: Vllm) -> Iterator[Server]:
    with VllmServer(vllm, random_llama(), own_cores(2), MAX_SEQUENCES, MAX_CONTEXT) as server:
        yield Server(server.address, NAME)


@contextmanager
def vllm_pair(vllm: Vllm) -> Iterator[Server]:
    """One after the other, so that the second finds compiled what the first has."""
    first, second = ([core] for core in own_cores(2))
    with (
        VllmServer(vllm, random_llama(), first, MAX_SEQUENCES, MAX_CONTEXT, of_pair=True) as prefill,
        VllmServer(vllm, random_llama(), second, MAX_SEQUENCES, MAX_CONTEXT, of_pair=True) as decode,
    ):
        yield Server(decode.address, NAME, prefill.address)


def measure(server: Server, rates: Sequence[float], num_requests: int) -> dict[float, tuple[float, ...]]:
    """Each rate has prompts of its own, so that nothing of it is cached."""

    def load(rate: float, count: int, seed: int) -> Outcome:
        plans = make_plans(rate, count, LLAMA_135M["vocab_size"], seed)
        return asyncio.run(run_http(server.address, server.model, plans, server.vllm_prefill))

    load(1e9, 3, seed=1000)
    return {rate: load(rate, num_requests, seed).figures() for seed, rate in enumerate(rates)}


def measured(
    name: str, serving: AbstractContextManager[Server], rates: Sequence[float], num_requests: int
) -> dict[float, tuple[float, ...]]:
    """From start to stop of a deployment."""
    with serving as server:
        figures = measure(server, rates, num_requests)
    print(name, {rate: [round(one, 1) for one in of_rate] for rate, of_rate in figures.items()}, flush=True)
    return figures


def peers(vllm: Vllm | None) -> dict[str, AbstractContextManager[Server]]:
    if vllm is None:
        return {}
    return {VLLM: vllm_server(vllm), **({VLLM_SPLIT: vllm_pair(vllm)} if vllm.has_nixl else {})}


def rows_of(found: Figures) -> list[Row]:
    """Each deployment of Penstock beside the other, and both beside vLLM where it was there."""
    pairs = [(SPLIT, COLOCATED), (COLOCATED, VLLM), (SPLIT, VLLM), (SPLIT, VLLM_SPLIT)]
    rows = []
    for rate in found[SPLIT]:
        for index, (metric, unit) in enumerate(METRICS):
            rows += [
                Row(f"{metric} at {rate:g}/s, {own}", found[own][rate][index], unit, other, found[other][rate][index])
                for own, other in pairs
                if other in found
            ]
    return rows


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: whoever was started ends too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    add_option(parser)
    options = parser.parse_args()
    try:
        vllm = find_vllm(options.vllm_python)
    except NoVllm as error:
        parser.error(str(error))
    said = vllm.describe() if vllm is not None else "no vLLM (--vllm-python, or make bench-vllm)"
    print(f"beside it: {said}", flush=True)
    servers = {COLOCATED: penstock_server(False, options.transport), SPLIT: penstock_server(True, options.transport)}
    found = {name: measured(name, server, options.rates, options.requests) for name, server in servers.items()}
    for name, peer in peers(vllm).items():
        try:
            found[name] = measured(name, peer, options.rates, options.requests)
        except (RuntimeError, TimeoutError) as error:  # ours stand without it
            print(f"{name} is left out: {error!r}", flush=True)
    workload = f"{options.requests} requests, 135M Llama shape, bf16, transport {options.transport}; beside {said}"
    publish("serving", workload, rows_of(found))


if __name__ == "__main__":
    main()
