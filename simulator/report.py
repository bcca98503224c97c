"""Summarizes a run: hit rate, balance, latencies and goodput, and the hit rate of a single large cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.page_pool import OutOfPages
from engine.cache.prefix_cache import PrefixCache
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import Outcome, TraceRequest
from simulator.routers.prompt_hashes import PromptHasher
from simulator.routers.router_model import SALT


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets; a request is good if it completes within both."""

    ttft_s: float = 5.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a run. `imbalance` is the busiest over the mean busy time of the workers that compute prompts."""

    num_requests: int
    num_failed: int
    hit_rate: float  # share of prompt tokens found in a cache
    imbalance: float
    decode_imbalance: float
    utilization: float  # busy share of the workers that compute prompts
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    goodput: float  # share of all requests
    requests_per_s: float


def summarize(fleet: SimulatedFleet, slo: Slo) -> Summary:
    """Returns the results of a finished run."""
    outcomes = fleet.outcomes
    complete = [outcome for outcome in outcomes if outcome.is_complete]
    prompts = sum(outcome.request.num_input_tokens for outcome in complete)
    ttfts = [outcome.ttft_s for outcome in complete if outcome.ttft_s is not None]
    tpots = [outcome.tpot_s for outcome in complete if outcome.num_tokens > 1]
    busy = {name: worker.loop.busy_s for name, worker in fleet.workers.items()}
    decode = [busy_s for name, busy_s in busy.items() if name.startswith("decode")]
    computing = [busy_s for name, busy_s in busy.items() if name.startswith("prefill")] or decode
    duration_s = fleet.sim.now_s
    num_good = sum((each.ttft_s or 0.0) <= slo.ttft_s and each.tpot_s <= slo.tpot_s for each in complete)
    return Summary(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(complete),
        hit_rate=sum(outcome.cached_tokens for outcome in complete) / max(1, prompts),
        imbalance=imbalance(computing),
        decode_imbalance=imbalance(decode),
        utilization=sum(computing) / len(computing) / duration_s,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_s=percentile(tpots, 0.5),
        tpot_p99_s=percentile(tpots, 0.99),
        goodput=num_good / len(outcomes),
        requests_per_s=len(complete) / duration_s,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile, 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def imbalance(busy: Sequence[float]) -> float:
    """Returns the busiest over the mean; 1 if none was busy."""
    mean = sum(busy) / len(busy)
    return max(busy) / mean if mean else 1.0


def offered_load(requests: Sequence[TraceRequest], spec: FleetSpec) -> float:
    """Returns the time to compute every prompt without caches over the workers' time until the last arrival."""
    costs, chunk = spec.prefill_costs, spec.prefill.max_batch_tokens or 2048
    work_s = sum(costs.prompt_s(request.num_input_tokens, chunk) for request in requests)
    return work_s / (requests[-1].arrival_s * (spec.num_prefill or spec.num_decode))


def single_cache_hit_rate(requests: Sequence[TraceRequest], page_size: int, num_pages: int) -> float:
    """Returns the hit rate of one cache as large as all workers' caches, with the requests one after another.

    It is an upper bound for every placement, up to chance: no page is held twice, and running requests take no room.
    """
    cache = PrefixCache(num_pages, page_size)
    pool = cache.pool
    hasher = PromptHasher(page_size, SALT)
    hits = total = 0
    for request in requests:
        hashes = hasher.hashes(request)
        held = cache.match(hashes[: (request.num_input_tokens - 1) // page_size])
        hits, total = hits + len(held) * page_size, total + request.num_input_tokens
        try:
            pages = [*held, *pool.allocate(len(hashes) - len(held))]
        except OutOfPages:
            pages = held  # longer than the whole cache
        cache.insert(hashes[: len(pages)], pages)
        pool.release(pages)
    return hits / max(1, total)


def failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Counts, by error, the requests that did not complete."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        if not outcome.is_complete:
            unended = "cancelled" if outcome.num_ends else "not ended"
            name = type(outcome.error).__name__ if outcome.error else unended
            found[name] = found.get(name, 0) + 1
    return found
