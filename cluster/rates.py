"""From two looks at a deployment to what happens in it each second. Pure.

Workers report totals since they started, routers counters and histograms: the difference of two looks is what happened
between them. A worker or router that was replaced meanwhile begins anew; it is left out until the look after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from penstock.v1 import admin_pb2, worker_pb2

_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_COUNTERS = ("vllm:generation_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")

Buckets = Mapping[float, float]  # upper bound to cumulative count


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What one router has counted since it started."""

    ttft: Buckets = field(default_factory=dict)
    itl: Buckets = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    num_waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float  # monotonic
    status: admin_pb2.StatusResponse
    routers: Mapping[str, RouterCounts]  # by address; without those that could not be read


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """None: not known yet, or nothing of it happened."""

    worker_id: str
    role: str
    state: str
    num_running: int
    num_waiting: int
    pages_used: float | None  # share
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    step_s: float | None
    hit_rate: float | None  # of pages that its prefix cache was asked for
    detail: str = ""  # how far it is on its way to ready, or what is wrong with it


@dataclass(frozen=True, slots=True)
class Rates:
    ready: bool
    workers: Sequence[WorkerRates]
    tokens_per_s: float | None
    hit_rate: float | None  # of prompt tokens
    num_queued: float | None  # in the routers
    # Median and 99th percentile: upper bounds of their buckets, None beyond the last one.
    ttft_s: tuple[float | None, float | None] | None
    itl_s: tuple[float | None, float | None] | None


def read_counts(text: str) -> RouterCounts:
    """Of a router's text exposition."""
    buckets: dict[str, dict[float, float]] = {_TTFT: {}, _ITL: {}}
    counters: dict[str, float] = {}
    num_waiting = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket") and (found := buckets.get(family.name)) is not None:
                found[float(sample.labels["le"])] = sample.value
            elif sample.name in _COUNTERS:
                counters[sample.name] = sample.value
            elif sample.name == "penstock:admission_queue_depth":
                num_waiting += sample.value
    return RouterCounts(buckets[_TTFT], buckets[_ITL], counters, num_waiting)


def rates(before: Sample, now: Sample) -> Rates:
    elapsed_s = now.at_s - before.at_s
    old = {(one.member.worker_id, one.member.epoch): one for one in before.status.workers}
    workers = [
        _worker(one, old.get((one.member.worker_id, one.member.epoch)), elapsed_s)
        for one in now.status.workers
        if one.member.role != "router"
    ]
    pairs = [(before.routers[key], counts) for key, counts in now.routers.items() if key in before.routers]
    grown = {name: _growth(name, pairs) for name in _COUNTERS}
    generated, queries, hits = (grown[name] for name in _COUNTERS)
    decoded = [one.decode_tokens_per_s for one in workers if one.decode_tokens_per_s is not None]
    return Rates(
        ready=now.status.ready,
        workers=workers,
        tokens_per_s=generated / elapsed_s if pairs and elapsed_s > 0 else (sum(decoded) if decoded else None),
        hit_rate=hits / queries if queries > 0 else None,
        num_queued=sum(one.num_waiting for one in now.routers.values()) if now.routers else None,
        ttft_s=_percentiles([(old_one.ttft, new.ttft) for old_one, new in pairs]),
        itl_s=_percentiles([(old_one.itl, new.itl) for old_one, new in pairs]),
    )


def _worker(now: admin_pb2.WorkerStatus, before: admin_pb2.WorkerStatus | None, elapsed_s: float) -> WorkerRates:
    load = now.load if now.HasField("load") else None
    old = before.load if before is not None and before.HasField("load") else None
    spans = (load, old) if load is not None and old is not None and elapsed_s > 0 else None
    return WorkerRates(
        worker_id=now.member.worker_id,
        role=now.member.role,
        state=now.state,
        num_running=load.num_running if load else 0,
        num_waiting=load.num_waiting if load else 0,
        pages_used=1 - load.free_pages / load.total_pages if load and load.total_pages else None,
        prefill_tokens_per_s=_per_s(spans[0].prefill_steps, spans[1].prefill_steps, elapsed_s) if spans else None,
        decode_tokens_per_s=_per_s(spans[0].decode_steps, spans[1].decode_steps, elapsed_s) if spans else None,
        step_s=load.step_s or None if load else None,
        hit_rate=_hit_rate(spans[0].cache, spans[1].cache) if spans else None,
        detail=now.detail,
    )


def _per_s(now: worker_pb2.StepTotals, before: worker_pb2.StepTotals, elapsed_s: float) -> float | None:
    grown = now.tokens - before.tokens
    return grown / elapsed_s if grown >= 0 else None


def _hit_rate(now: worker_pb2.CacheStats, before: worker_pb2.CacheStats) -> float | None:
    queries = now.queries - before.queries
    hits = sum(getattr(now, name) - getattr(before, name) for name in ("device_hits", "host_hits", "disk_hits"))
    return hits / queries if queries > 0 else None


def _growth(name: str, pairs: Iterable[tuple[RouterCounts, RouterCounts]]) -> float:
    """A counter that fell began anew: what it has is what came since."""
    total = 0.0
    for before, now in pairs:
        new, old = now.counters.get(name, 0.0), before.counters.get(name, 0.0)
        total += new - old if new >= old else new
    return total


def _percentiles(pairs: Sequence[tuple[Buckets, Buckets]]) -> tuple[float | None, float | None] | None:
    grown: dict[float, float] = {}
    for before, now in pairs:
        for bound, count in now.items():
            grown[bound] = grown.get(bound, 0.0) + max(0.0, count - before.get(bound, 0.0))
    total = max(grown.values(), default=0.0)
    return (_quantile(grown, 0.5 * total), _quantile(grown, 0.99 * total)) if total > 0 else None


def _quantile(cumulative: Buckets, rank: float) -> float | None:
    bound = next(bound for bound in sorted(cumulative) if cumulative[bound] >= rank)
    return bound if math.isfinite(bound) else None
