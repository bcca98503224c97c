"""Measures simulated requests a second of processor time, for deployments of several sizes (`make bench-simulator`).

The baseline sends every load report as a message at its time, instead of letting it wait until a router reads it. Both
must have equal results, bit for bit. Traces come from the folder in PENSTOCK_TRACES; without it only the generated mix
runs.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.report import RESULTS, Row, publish
from benchmarks.common.timing import elapsed_s
from penstock.errors import InvalidInput
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.replay import GENERATED, fit, read_requests
from simulator.request import TraceRequest

_PAGES, _PAGE_SIZE = 7500, 64


@dataclass(frozen=True, slots=True)
class SpeedCase:
    name: str
    trace: str
    num_pairs: int  # pairs of a prefill and a decode worker
    load: float
    limit: int


CASES = (
    SpeedCase("Mooncake conversation, 16 workers", "mooncake_conversation_first3000.jsonl.gz", 8, 0.9, 600),
    SpeedCase("Azure conversation, 16 workers", "azure2023_conv_first5000.jsonl.gz", 8, 0.8, 1500),
    SpeedCase("agents' sessions, 16 workers", "agents_sessions_40.jsonl.gz", 8, 0.6, 300),
    SpeedCase("shared prefixes, 100 workers", GENERATED, 50, 1.5, 1500),
    SpeedCase("shared prefixes, 1,000 workers", GENERATED, 500, 1.5, 1500),
)


@dataclass(frozen=True, slots=True)
class Speed:
    requests_per_s: float  # per second of processor time
    events_per_request: float
    digest: str  # hash of every request's times and workers


def measure(spec: FleetSpec, requests: Sequence[TraceRequest], sends_reports: bool) -> Speed:
    """Runs all requests to their end."""
    fleet = SimulatedFleet(spec, 0)
    if sends_reports:
        fleet.network.cut("nobody", "nobody else")  # a fault that changes nothing else
    for request in requests:
        fleet.submit(request)
    seconds = elapsed_s(fleet.run, time.process_time)
    digest = hashlib.sha256()
    for outcome in fleet.outcomes:
        served = (
            outcome.first_token_s,
            outcome.end_s,
            outcome.num_tokens,
            outcome.cached_tokens,
            outcome.computed_by,
            outcome.decoded_by,
        )
        digest.update(repr(served).encode())
    return Speed(len(requests) / seconds, fleet.sim.num_events / len(requests), digest.hexdigest()[:16])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of simulator.json")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for case in CASES:
        try:
            requests = read_requests(case.trace, 0, max(1, int(case.limit * args.share)))
        except InvalidInput as error:
            print(f"skipped: {error}")
            continue
        spec = FleetSpec(case.num_pairs, case.num_pairs, _PAGE_SIZE, _PAGES, _PAGES)
        fitted, _ = fit(requests, spec, case.load)
        sent, waiting = measure(spec, fitted, True), measure(spec, fitted, False)
        assert sent.digest == waiting.digest, f"{case.name}: results differ"
        print(f"{case.name}: {len(fitted)} requests, results {waiting.digest}", flush=True)
        each = "every report a message"
        rows.append(Row(case.name, waiting.requests_per_s, "requests/s", each, sent.requests_per_s))
        events, before = waiting.events_per_request, sent.events_per_request
        rows.append(Row(f"{case.name}, events", events, "a request", each, before))
    workload = "replays in virtual time, requests a second of processor time, pages of 64 tokens, pools of 7,500"
    publish("simulator", workload, rows, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
