"""Runs the study: a trace at a load under a policy gives the policy's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from penstock.errors import InvalidInput
from simulator.fleet import FleetSpec
from simulator.replay import GENERATED, fit, read_requests, replay
from simulator.report import Slo, Summary, single_cache_hit_rate
from simulator.request import TraceRequest
from simulator.traces import in_order, scale_arrivals

PRODUCT = "kv-aware"
POLICIES = (PRODUCT, "consistent-hash", "least-loaded", "round-robin")
LOADS = (1.2, 1.6, 2.0)  # multiples of the capacity; see `run`
SPEC = FleetSpec(
    page_size=64,
    prefill_pages=7500,  # 480,000 tokens
    decode_pages=7500,
    report_interval_s=0.05,
    timeout_s=3600.0,  # no request times out, so that every policy computes every prompt
)
_SHORTEST = 400  # requests of a part that is worth a replay


@dataclass(frozen=True, slots=True)
class TracePart:
    """A part of a trace, of at most `limit` requests."""

    name: str
    trace: str
    skipped: int = 0  # requests before the part
    limit: int = 1500
    # Recorded at the rate that the decode workers' memory allows, so that loads are multiples of it. See `run`.
    fills_memory: bool = False

    def requests(self, seed: int) -> list[TraceRequest]:
        """Returns the part's requests, the first at 0. Raises InvalidInput if the trace is missing or too short."""
        found = read_requests(self.trace, seed, self.skipped + self.limit)[self.skipped :]
        if len(found) < _SHORTEST:
            raise InvalidInput(
                "trace", f"{self.trace} has {len(found)} requests after the first {self.skipped}; use a longer one"
            )
        return in_order(found)


TRAFFIC = (
    TracePart("Mooncake, first half", "mooncake_conversation_first3000.jsonl.gz"),
    TracePart("Mooncake, second half", "mooncake_conversation_first3000.jsonl.gz", skipped=1500),
    TracePart("agents", "agents_sessions_40.jsonl.gz", limit=500, fills_memory=True),
    TracePart("shared prefixes", GENERATED),
    TracePart("Azure conversation", "azure2023_conv_first5000.jsonl.gz"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A replay."""

    traffic: TracePart
    load: float
    policy: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.traffic.name} at {self.load:g}, seed {self.seed}, {self.policy}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of one policy."""

    traffic: str
    load: float
    policy: str
    seed: int
    times_recorded_rate: float
    single_cache_hit_rate: float
    summary: Summary

    @property
    def kept_hits(self) -> float:
        """Hits as a share of those of one cache as large as all prefill workers' caches."""
        return self.summary.hit_rate / self.single_cache_hit_rate if self.single_cache_hit_rate else 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunResult:
        return cls(**(value | {"summary": Summary(**value["summary"])}))


def run(case: Run) -> RunResult:
    """Replays a case to its end.

    The load is the time that the prompts would take if the hits of one large cache were free, over the prefill workers'
    time until the last arrival. Above 1, queues grow until then under any policy. For traffic that fills the decode
    workers' memory long before, the load is a multiple of the recorded rate.
    """
    spec = replace(SPEC, policy=case.policy)
    requests = case.traffic.requests(case.seed)
    kept, _ = fit(requests, spec, None)
    single = single_cache_hit_rate(kept, spec.page_size, spec.num_prefill * spec.prefill_pages)
    if case.traffic.fills_memory:
        fitted, factor = scale_arrivals(kept, case.load), case.load
    else:
        fitted, factor = fit(kept, spec, case.load / (1.0 - single))
    summary, _ = replay(fitted, spec, case.seed, Slo())
    return RunResult(case.traffic.name, case.load, case.policy, case.seed, factor, single, summary)


def cases(traffic: Sequence[TracePart], loads: Sequence[float], policies: Sequence[str], num_seeds: int) -> list[Run]:
    return [Run(*each) for each in product(traffic, loads, policies, range(num_seeds))]


def run_all(runs: Sequence[Run], num_processes: int) -> Iterator[RunResult]:
    """Yields results in the order of the runs, which are computed in parallel."""
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(run, runs)
