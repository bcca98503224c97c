"""Replays every trace under every placement policy in virtual time: hit rate, balance, latencies and goodput.

`python -m benchmarks.router.replay` takes traces from the folder in PENSTOCK_TRACES; without it only the generated mix
runs. Hit rates are compared with that of a single cache. Arrivals are scaled to an offered load: the time that the
prompts would take without any cache, over the capacity of the workers.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.common.report import RESULTS, Curves, distribution, today, versions, write_result
from penstock.errors import InvalidInput
from simulator.fleet import FleetSpec
from simulator.replay import GENERATED, HEADER, UNLIMITED, fit, line, read_requests, replay, with_pages
from simulator.report import Slo, single_cache_hit_rate
from simulator.request import Outcome, TraceRequest

_POLICIES = ("kv-aware", "consistent-hash", "least-loaded", "round-robin", "random")
_INTERVALS = 60  # parts of a run in charts over time
_CACHE_TOKENS = 480_000  # cache of each worker: 30,000 pages of 16 tokens


@dataclass(frozen=True, slots=True)
class Case:
    trace: str
    load: float
    limit: int
    repeats: bool  # prefixes repeat, so that it is replayed with unlimited caches, too


CASES = (
    Case(GENERATED, 1.5, 3000, False),  # its prefixes fit into every cache
    Case(GENERATED, 2.8, 3000, False),
    Case("mooncake_conversation_first3000.jsonl.gz", 0.9, 3000, True),
    Case("azure2023_conv_first5000.jsonl.gz", 0.8, 3000, False),
    Case("azure2023_code_full.jsonl.gz", 0.5, 3000, False),
    Case("servegen_reason_deepseekr1.jsonl.gz", 0.03, 400, False),  # limited by decoding: its answers are long
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.replay", description=__doc__)
    parser.add_argument("--page-size", type=int, default=64, help="16 takes four times as long and changes little")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each trace")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of replay.json and its charts")
    args = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    curves: list[Curves] = []
    for case in CASES:
        try:
            requests = read_requests(case.trace, 0, int(case.limit * args.share))
        except InvalidInput as error:
            print(f"skipped: {error}")
            continue
        for pages in (_CACHE_TOKENS // args.page_size, *((UNLIMITED,) if case.repeats else ())):
            found, lines = run_case(case, requests, args.page_size, pages)
            rows += found
            curves += lines
            result = {"name": "replay", "date": today(), "versions": versions(), "rows": rows}
            write_result(result | {"curves": [asdict(each) for each in curves]}, args.results)
    return 0


def run_case(
    case: Case, requests: Sequence[TraceRequest], page_size: int, pages: int
) -> tuple[list[dict[str, object]], list[Curves]]:
    """Returns a row for each policy, the distributions of their latencies, and TTFT over time."""
    base = FleetSpec(page_size=page_size, report_interval_s=0.05)
    spec = with_pages(base, pages, requests)
    fitted, factor = fit(requests, spec, case.load)
    single = single_cache_hit_rate(fitted, page_size, spec.num_prefill * spec.prefill_pages)
    shown = "unlimited" if pages == UNLIMITED else pages
    print(
        f"\n{case.trace}: {len(fitted)} of {len(requests)} requests, {factor:.3g} times as fast as recorded, "
        f"offered load {case.load}; {shown} pages of {page_size} tokens a worker; a single cache hits {single:.1%}\n"
        + HEADER
    )
    rows: list[dict[str, object]] = []
    outcomes: dict[str, list[Outcome]] = {}
    for policy in _POLICIES:
        summary, fleet = replay(fitted, replace(spec, policy=policy), 0, Slo())
        outcomes[policy] = [each for each in fleet.outcomes if each.is_complete]
        print(line(policy, summary, single), flush=True)
        rows.append(
            {
                "trace": case.trace,
                "offered_load": case.load,
                "times_recorded_rate": factor,
                "cache_pages": pages or "unlimited",
                "page_size": page_size,
                "single_cache_hit_rate": single,
                "policy": policy,
            }
            | asdict(summary)
        )
    name = f"{case.trace.removesuffix('.jsonl.gz')} at load {case.load:g}, {shown} pages a worker"
    return rows, list(_curves(name, outcomes))


def _curves(name: str, outcomes: Mapping[str, Sequence[Outcome]]) -> Iterator[Curves]:
    ttfts = {policy: [each.ttft_s or 0.0 for each in found] for policy, found in outcomes.items()}
    yield distribution(f"TTFT, {name}", "TTFT, s", ttfts)
    tpots = {policy: [each.tpot_s for each in found if each.num_tokens > 1] for policy, found in outcomes.items()}
    yield distribution(f"TPOT, {name}", "TPOT, s", tpots)
    lines = {policy: _median_over_time(found) for policy, found in outcomes.items()}
    yield Curves(f"TTFT over time, {name}", "arrival, s", "median TTFT, s", lines)


def _median_over_time(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Returns the median TTFT of the requests that arrived in each sixtieth of the run."""
    end_s = max((each.request.arrival_s for each in outcomes), default=0.0)
    intervals: defaultdict[int, list[float]] = defaultdict(list)
    for each in outcomes:
        intervals[min(_INTERVALS - 1, int(each.request.arrival_s / max(end_s, 1e-9) * _INTERVALS))].append(
            each.ttft_s or 0.0
        )
    middle = end_s / _INTERVALS
    return [
        (round((index + 0.5) * middle, 2), float(f"{statistics.median(found):.4g}"))
        for index, found in sorted(intervals.items())
    ]


if __name__ == "__main__":
    raise SystemExit(main())
