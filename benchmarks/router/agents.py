"""Replays recorded agents' sessions in virtual time: hits, time to first token by turn, and bytes moved.

`make bench-agents` takes the trace from the folder that PENSTOCK_TRACES names. Its requests arrive as recorded, at 8
prefill and 8 decode workers of the 8B shape with 480,000 tokens of KV each, which hold a part of what the sessions use.
Hits are compared with those of one cache as large as all of the prefill workers' together; bytes with those of every
prompt sent whole.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.report import Curves, Row, distribution, publish
from penstock.bench.traces.read import read_trace
from penstock.errors import InvalidInput
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.replay import replay
from simulator.report import Slo, percentile, single_cache_hit_rate
from simulator.request import TraceRequest
from simulator.traces import to_trace_request
from simulator.workers.prefill_model import PrefillModel

TRACE = "agents_sessions_40.jsonl.gz"
_PAGE_TOKENS, _CACHE_TOKENS = 64, 480_000
_TURNS = {"first turns": range(1, 2), "turns 2 to 10": range(2, 11), "later turns": range(11, 1 << 30)}


@dataclass(frozen=True, slots=True)
class Way:
    """A policy, with prefixes pulled between workers or not."""

    name: str
    policy: str
    pulls: bool = False


WAYS = (
    Way("kv-aware, pulls", "kv-aware", pulls=True),
    Way("kv-aware", "kv-aware"),
    Way("consistent-hash", "consistent-hash"),
    Way("least-loaded", "least-loaded"),
)


def read_turns(limit: int, max_tokens: int) -> tuple[list[TraceRequest], list[int]]:
    """Returns the requests of at most `max_tokens`, and which turn of its session and agent each is, from 1."""
    requests: list[TraceRequest] = []
    turns: list[int] = []
    seen: Counter[tuple[str, str]] = Counter()
    for record in read_trace(TRACE, 0, limit).records:
        speaker = (record.session, record.agent)
        seen[speaker] += 1
        if record.num_tokens <= max_tokens:
            requests.append(to_trace_request(len(requests), record))
            turns.append(seen[speaker])
    return requests, turns


def rows_of(way: Way, fleet: SimulatedFleet, turns: Sequence[int], single: float) -> Iterator[Row]:
    """Yields the figures of a run. `single` is the hit share of one cache."""
    complete = [each for each in fleet.outcomes if each.is_complete]
    prompts = sum(each.request.num_input_tokens for each in complete)
    hits = sum(each.cached_tokens for each in complete)
    yield Row(f"{way.name}: hits", hits / prompts, "share of prompt tokens", "one cache", single)
    token_bytes = fleet.links.token_bytes
    pulled = sum(w.pulls.num_pulled_tokens for w in fleet.workers.values() if isinstance(w, PrefillModel))
    whole = prompts * token_bytes / 1e12
    yield Row(f"{way.name}: KV moved between workers", fleet.links.bytes_moved / 1e12, "TB", "every prompt", whole)
    yield Row(f"{way.name}: of it pulled by prefill workers", pulled * token_bytes / 1e12, "TB", "every prompt", whole)
    for name, ttfts in ttfts_by_turn(fleet, turns).items():
        for share in (0.5, 0.9):
            yield Row(f"{way.name}: TTFT p{share * 100:.0f} of {name}", percentile(ttfts, share), "s")


def ttfts_by_turn(fleet: SimulatedFleet, turns: Sequence[int]) -> dict[str, list[float]]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in fleet.outcomes:
        if outcome.ttft_s is not None:
            turn = turns[outcome.request.number]
            found[next(name for name, numbers in _TURNS.items() if turn in numbers)].append(outcome.ttft_s)
    return {name: found[name] for name in _TURNS}


def measure(limit: int) -> tuple[str, list[Row], list[Curves]]:
    requests, turns = read_turns(limit, _CACHE_TOKENS)
    pages = _CACHE_TOKENS // _PAGE_TOKENS
    spec = FleetSpec(page_size=_PAGE_TOKENS, prefill_pages=pages, decode_pages=pages, report_interval_s=0.05)
    single = single_cache_hit_rate(requests, _PAGE_TOKENS, spec.num_prefill * pages)
    rows: list[Row] = []
    lines: dict[str, Sequence[float]] = {}
    for way in WAYS:
        _, fleet = replay(requests, replace(spec, policy=way.policy, pull=way.pulls), 0, Slo())
        rows += rows_of(way, fleet, turns, single)
        lines[way.name] = ttfts_by_turn(fleet, turns)["later turns"]
        print(f"{way.name}: done", flush=True)
    workload = f"{TRACE}: {len(requests)} requests at their recorded times, virtual time"
    return workload, rows, [distribution("TTFT of agents' later turns", "TTFT, s", lines)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limit", type=int, default=1500, help="replay only the first requests")
    workload, rows, curves = measure(parser.parse_args().limit)
    publish("agents", workload, rows, curves=curves)


if __name__ == "__main__":
    try:
        main()
    except InvalidInput as error:
        raise SystemExit(f"{error.message}; set PENSTOCK_TRACES to the folder of the traces") from error
