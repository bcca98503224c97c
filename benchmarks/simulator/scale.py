"""Runs a thousand workers through a stream of requests and writes the figures (`make bench-simulator-scale`)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.report import RESULTS, Row, publish
from simulator.scale import ScaleResult, during, large_spec, progress_line, report, run_at_scale, traffic


def rows_of(result: ScaleResult) -> list[Row]:
    """Returns the figures of a run."""
    return [
        Row("requests", result.num_requests, "requests"),
        Row("not complete", result.num_failed, "requests"),
        Row("hits", result.hit_rate * 100, "% of prompt tokens"),
        Row("busiest over mean prefill worker", result.imbalance, "x"),
        Row("busiest over mean decode worker", result.decode_imbalance, "x"),
        Row("TTFT p50", result.ttft_p50_s * 1e3, "ms"),
        Row("TTFT p99", result.ttft_p99_s * 1e3, "ms"),
        Row("TPOT p50", result.tpot_p50_s * 1e3, "ms"),
        Row("TPOT p99", result.tpot_p99_s * 1e3, "ms"),
        Row("placed and served", result.requests_per_processor_s, "requests/s of processor time"),
        Row("placed", result.placements_per_processor_s, "requests/s of the router's processor time"),
        Row("simulated", result.simulated_s, "s"),
        Row("peak memory", result.peak_memory_bytes / 2**20, "MiB"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator.scale", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="half prefill and half decode workers")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--cache-pages", type=int, default=2000, help="of each worker, 64 tokens each")
    parser.add_argument("--load", type=float, default=1.0, help="1: prompts take all prefill workers without caches")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of simulator_scale.json")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the traffic after this real time")
    args = parser.parse_args(argv)
    workload = (
        f"{args.workers} workers, conversations over shared prefixes, load {args.load:g}, {args.cache_pages} pages of "
        "64 tokens each"
    )

    def write(result: ScaleResult) -> None:
        """Writes the figures so far, so that a run that is stopped leaves them."""
        print(progress_line(result), flush=True)
        publish("simulator_scale", workload, rows_of(result), args.results, quiet=True)

    requests = during(traffic(args.workers, args.requests, 0, args.load), args.minutes)
    result = run_at_scale(large_spec(args.workers, args.cache_pages), requests, 0, write)
    print(report(result))
    publish("simulator_scale", workload, rows_of(result), args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
