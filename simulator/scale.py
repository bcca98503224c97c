"""Runs a large deployment through a stream of requests in bounded memory.

`python -m simulator.scale --workers 1000 --requests 1000000` generates the traffic during the run, keeps three numbers
of each request that has ended, and prints hit rate, balance, latencies, requests and placements a second of processor
time, and memory. `--minutes` ends the traffic early; requests that have arrived by then are served.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from simulator.costs.step_costs import PrefillCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.report import imbalance, percentile
from simulator.request import Outcome, TraceRequest
from simulator.traces import SharedPrefixMix

_PROGRESS_S = 30.0  # real time between two lines
_SAMPLE = 2000  # requests from whose prompts the mean length of all is estimated
_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """The figures of a run. Seconds are virtual unless named processor time; that and memory are this process's."""

    num_workers: int
    num_requests: int
    num_failed: int
    hit_rate: float
    imbalance: float  # busiest over mean busy time, of the workers that compute prompts
    decode_imbalance: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    simulated_s: float
    processor_s: float
    placing_s: float  # the part of `processor_s` in which the router chose workers
    peak_memory_bytes: int

    @property
    def requests_per_processor_s(self) -> float:
        return self.num_requests / self.processor_s

    @property
    def placements_per_processor_s(self) -> float:
        """The rate of the real decisions alone: matching the prompt, pricing workers, choosing and crediting them."""
        return self.num_requests / self.placing_s if self.placing_s else 0.0


@dataclass(slots=True)
class EndedRequests:
    """Counts outcomes and forgets them. Latencies are kept as columns of doubles, 8 bytes each."""

    num_ended: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: array[float] = field(default_factory=lambda: array("d"))
    tpots_s: array[float] = field(default_factory=lambda: array("d"))

    def add(self, outcome: Outcome) -> None:
        self.num_ended += 1
        if not outcome.is_complete:
            self.num_failed += 1
            return
        self.prompt_tokens += outcome.request.num_input_tokens
        self.cached_tokens += outcome.cached_tokens
        self.ttfts_s.append(outcome.ttft_s or 0.0)
        if outcome.num_tokens > 1:
            self.tpots_s.append(outcome.tpot_s)


def run_at_scale(
    spec: FleetSpec,
    requests: Iterator[TraceRequest],
    seed: int = 0,
    progress: Callable[[ScaleResult], None] = lambda result: None,
) -> ScaleResult:
    """Runs a stream of requests, which arrive in order, to its end.

    Calls `progress` every half minute of real time with the figures so far.
    """
    fleet, ended = SimulatedFleet(spec, seed), EndedRequests()
    began_s, next_s = time.process_time(), time.monotonic() + _PROGRESS_S

    def on_end(outcome: Outcome) -> None:
        nonlocal next_s
        ended.add(outcome)
        if time.monotonic() >= next_s:
            progress(_result(fleet, ended, time.process_time() - began_s))
            next_s = time.monotonic() + _PROGRESS_S

    fleet.submit_stream(requests, on_end)
    fleet.run()
    return _result(fleet, ended, time.process_time() - began_s)


def _result(fleet: SimulatedFleet, ended: EndedRequests, processor_s: float) -> ScaleResult:
    busy = {name: worker.loop.busy_s for name, worker in fleet.workers.items()}
    decode = [busy_s for name, busy_s in busy.items() if name.startswith("decode")]
    return ScaleResult(
        num_workers=len(fleet.workers),
        num_requests=ended.num_ended,
        num_failed=ended.num_failed,
        hit_rate=ended.cached_tokens / max(1, ended.prompt_tokens),
        imbalance=imbalance([busy_s for name, busy_s in busy.items() if name.startswith("prefill")] or decode),
        decode_imbalance=imbalance(decode),
        ttft_p50_s=percentile(ended.ttfts_s, 0.5),
        ttft_p99_s=percentile(ended.ttfts_s, 0.99),
        tpot_p50_s=percentile(ended.tpots_s, 0.5),
        tpot_p99_s=percentile(ended.tpots_s, 0.99),
        simulated_s=fleet.sim.now_s,
        processor_s=processor_s,
        placing_s=fleet.router.placing_s,
        peak_memory_bytes=peak_memory(),
    )


def during(requests: Iterator[TraceRequest], minutes: float) -> Iterator[TraceRequest]:
    """Yields requests until so many minutes of real time have passed."""
    end_s = time.monotonic() + minutes * 60
    return itertools.takewhile(lambda _: time.monotonic() < end_s, requests)


def progress_line(result: ScaleResult) -> str:
    return (
        f"{result.num_requests} requests, {result.requests_per_processor_s:.0f} a second of processor time, "
        f"{result.peak_memory_bytes / 1e6:.0f} MB"
    )


def peak_memory() -> int:
    """Returns the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def traffic(num_workers: int, num_requests: int, seed: int, load: float) -> Iterator[TraceRequest]:
    """Makes conversations over shared prefixes, at `load` times what half of the workers compute without caches."""
    mix, costs = SharedPrefixMix(num_requests=num_requests, num_systems=num_workers), PrefillCosts()
    sample = itertools.islice(mix.stream(seed), _SAMPLE)
    prompts_s = [costs.prompt_s(request.num_input_tokens, _CHUNK_TOKENS) for request in sample]
    requests_per_s = load * (num_workers // 2) * len(prompts_s) / sum(prompts_s)
    return replace(mix, requests_per_s=requests_per_s).stream(seed)


def report(result: ScaleResult) -> str:
    """Describes a run in a few lines."""
    return "\n".join(
        (
            f"{result.num_requests} requests, {result.num_failed} not complete, on {result.num_workers} workers in "
            f"{result.simulated_s:.0f} simulated seconds",
            f"hits {result.hit_rate:.1%} of prompt tokens; busiest over mean {result.imbalance:.2f} (prefill), "
            f"{result.decode_imbalance:.2f} (decode)",
            f"TTFT p50 {result.ttft_p50_s:.3f} s, p99 {result.ttft_p99_s:.3f} s; "
            f"TPOT p50 {result.tpot_p50_s * 1e3:.1f} ms, p99 {result.tpot_p99_s * 1e3:.1f} ms",
            f"{result.requests_per_processor_s:.0f} requests, each placed and served, a second of processor time "
            f"({result.processor_s:.0f} s), {result.placements_per_processor_s:.0f} placements a second by themselves; "
            f"at most {result.peak_memory_bytes / 1e9:.2f} GB of memory",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.scale", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="half prefill and half decode workers")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--cache-pages", type=int, default=2000, help="of each worker, 64 tokens each")
    parser.add_argument("--load", type=float, default=1.0, help="1: prompts take all prefill workers without caches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the traffic after this real time")
    args = parser.parse_args(argv)
    if args.workers < 2 or args.requests < 1 or args.cache_pages < 1 or args.load <= 0:
        parser.error("give at least 2 workers, 1 request and 1 page, and a load above 0")
    spec = large_spec(args.workers, args.cache_pages)
    requests = during(traffic(args.workers, args.requests, args.seed, args.load), args.minutes)
    print(report(run_at_scale(spec, requests, args.seed, lambda result: print(progress_line(result), flush=True))))
    return 0


def large_spec(num_workers: int, cache_pages: int) -> FleetSpec:
    """Returns a deployment of half prefill and half decode workers."""
    return FleetSpec(num_workers // 2, num_workers - num_workers // 2, 64, cache_pages, cache_pages)


if __name__ == "__main__":
    raise SystemExit(main())
