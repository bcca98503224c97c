"""Computes rates from two snapshots of a deployment. Pure.

Workers report totals since they started, routers counters and histograms; rates are differences between the snapshots.
A worker or router that was replaced between them counts from zero and is left out until the next snapshot.
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
    """Counts of one router since it started."""

    ttft: Buckets = field(default_factory=dict)
    itl: Buckets = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    num_waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """Status and router counts at one moment."""

    at_s: float  # monotonic
    status: admin_pb2.StatusResponse
    routers: Mapping[str, RouterCounts]  # by endpoint
    unread: Mapping[str, str] = field(default_factory=dict)  # routers that could not be read, by endpoint, and why


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of one worker. None means unknown, or that nothing of the kind happened."""

    worker_id: str
    role: str
    state: str
    num_running: int
    num_waiting: int
    pages_used: float | None  # share
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    step_s: float | None
    hit_rate: float | None  # of pages looked up in its prefix cache
    detail: str = ""  # progress of its start, or what is wrong with it


@dataclass(frozen=True, slots=True)
class DeploymentRates:
    """Rates of the whole deployment. None means unknown, or that nothing of the kind happened."""

    ready: bool
    workers: Sequence[WorkerRates]
    tokens_per_s: float | None
    hit_rate: float | None  # of prompt tokens
    num_queued: float | None  # in the routers
    # Median and 99th percentile as upper bounds of their buckets; None beyond the last bucket.
    ttft_s: tuple[float | None, float | None] | None
    itl_s: tuple[float | None, float | None] | None
    unread: Mapping[str, str] = field(default_factory=dict)  # routers whose figures are missing, and why


def read_counts(text: str) -> RouterCounts:
    """Parses a router's /metrics in Prometheus text format."""
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


def compute_rates(before: DeploymentSnapshot, now: DeploymentSnapshot) -> DeploymentRates:
    """Returns what happened per second between two snapshots."""
    elapsed_s = now.at_s - before.at_s
    earlier = {(worker.member.worker_id, worker.member.epoch): worker for worker in before.status.workers}
    workers = [
        _worker(worker, earlier.get((worker.member.worker_id, worker.member.epoch)), elapsed_s)
        for worker in now.status.workers
        if worker.member.role != "router"
    ]
    pairs = [(before.routers[key], counts) for key, counts in now.routers.items() if key in before.routers]
    generated, queries, hits = (_growth(name, pairs) for name in _COUNTERS)
    decode_rates = [worker.decode_tokens_per_s for worker in workers if worker.decode_tokens_per_s is not None]
    from_workers = sum(decode_rates) if decode_rates else None
    return DeploymentRates(
        ready=now.status.ready,
        workers=workers,
        tokens_per_s=generated / elapsed_s if pairs and elapsed_s > 0 else from_workers,
        hit_rate=hits / queries if queries > 0 else None,
        num_queued=sum(router.num_waiting for router in now.routers.values()) if now.routers else None,
        ttft_s=_percentiles([(old.ttft, new.ttft) for old, new in pairs]),
        itl_s=_percentiles([(old.itl, new.itl) for old, new in pairs]),
        unread=now.unread,
    )


def _worker(now: admin_pb2.WorkerStatus, before: admin_pb2.WorkerStatus | None, elapsed_s: float) -> WorkerRates:
    load = now.load if now.HasField("load") else None
    old = before.load if before is not None and before.HasField("load") else None
    pair = (load, old) if load is not None and old is not None and elapsed_s > 0 else None
    return WorkerRates(
        worker_id=now.member.worker_id,
        role=now.member.role,
        state=now.state,
        num_running=load.num_running if load else 0,
        num_waiting=load.num_waiting if load else 0,
        pages_used=1 - load.free_pages / load.total_pages if load and load.total_pages else None,
        prefill_tokens_per_s=_per_s(pair[0].prefill_steps, pair[1].prefill_steps, elapsed_s) if pair else None,
        decode_tokens_per_s=_per_s(pair[0].decode_steps, pair[1].decode_steps, elapsed_s) if pair else None,
        step_s=load.step_s or None if load else None,
        hit_rate=_hit_rate(pair[0].cache, pair[1].cache) if pair else None,
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
    """Sums a counter's growth; a counter that fell was reset, and its whole value is new."""
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
