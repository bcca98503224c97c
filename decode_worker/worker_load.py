"""Measures the load that a decode worker reports with every batch of events."""

from __future__ import annotations

from decode_worker.readiness import SequenceReadiness
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.cache.prefix_cache import PrefixCache
from penstock.types import RequestTotals, WorkerLoad


def measure_load(
    cache: PrefixCache,
    scheduler: DecodeScheduler,
    pace: Pace,
    readiness: SequenceReadiness,
    requests: RequestTotals,
    num_open: int,
) -> WorkerLoad:
    """Returns the load of a worker that holds `num_open` requests, without what its transfers and placement add."""
    bulk = scheduler.bulk_use
    return WorkerLoad(
        num_running=scheduler.num_running,
        num_waiting=num_open - scheduler.num_running,
        num_bulk=bulk.num_sequences,
        free_pages=cache.pool.num_reported,
        bulk_pages=bulk.num_pages,
        total_pages=cache.pool.num_pages,
        queued_prefill_tokens=scheduler.num_uncomputed_tokens,
        queued_bulk_tokens=bulk.num_uncomputed_tokens,
        prefill_tokens_per_s=pace.chunk_tokens_per_s,
        step_s=pace.step_s,
        cache=cache.stats,
        prefill_steps=pace.prefill_steps,
        decode_steps=pace.decode_steps,
        num_open=num_open,
        requests=requests,
        adapters=readiness.loaded_adapters,
        adapter_load_s=readiness.adapter_load_s,
        metrics=scheduler.metrics.values(),
    )
