"""What a run shows: hits, balance, latencies and goodput, and the cache that it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.page_pool import OutOfPages, PagePool
from engine.prefix_cache import PrefixCache
from penstock.page_hash import hash_pages
from simulator.fleet import Fleet, FleetSpec
from simulator.request import Outcome, TraceRequest
from simulator.router_model import SALT


@dataclass(frozen=True, slots=True)
class Slo:
    """A request counts as good when it completes within both."""

    ttft_s: float = 5.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds. `imbalance` is the busiest worker's time over the mean, of those that compute prompts."""

    num_requests: int
    num_failed: int
    hit_rate: float  # tokens of prompts that were not computed
    imbalance: float
    decode_imbalance: float
    utilization: float  # of the workers that compute prompts
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    goodput: float  # share of all requests
    requests_per_s: float


def summarize(fleet: Fleet, slo: Slo) -> Summary:
    outcomes = fleet.outcomes
    complete = [one for one in outcomes if one.is_complete]
    prompts = sum(one.request.num_input_tokens for one in complete)
    ttfts = [one.ttft_s for one in complete if one.ttft_s is not None]
    tpots = [one.tpot_s for one in complete if one.num_tokens > 1]
    busy = {name: worker.loop.busy_s for name, worker in fleet.workers.items()}
    decode = [busy_s for name, busy_s in busy.items() if name.startswith("decode")]
    computing = [busy_s for name, busy_s in busy.items() if name.startswith("prefill")] or decode
    duration_s = fleet.sim.now_s
    good = [one for one in complete if (one.ttft_s or 0.0) <= slo.ttft_s and one.tpot_s <= slo.tpot_s]
    return Summary(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(complete),
        hit_rate=sum(one.cached_tokens for one in complete) / max(1, prompts),
        imbalance=_imbalance(computing),
        decode_imbalance=_imbalance(decode),
        utilization=sum(computing) / len(computing) / duration_s,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_s=percentile(tpots, 0.5),
        tpot_p99_s=percentile(tpots, 0.99),
        goodput=len(good) / len(outcomes),
        requests_per_s=len(complete) / duration_s,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _imbalance(busy: Sequence[float]) -> float:
    mean = sum(busy) / len(busy)
    return max(busy) / mean if mean else 1.0


def offered_load(requests: Sequence[TraceRequest], spec: FleetSpec) -> float:
    """Time to compute every prompt without any cache, over the time that the workers have until the last arrival."""
    costs, chunk = spec.prefill_costs, spec.prefill.max_batch_tokens or 2048
    work_s = sum(costs.prompt_s(request.num_input_tokens, chunk) for request in requests)
    return work_s / (requests[-1].arrival_s * (spec.num_prefill or spec.num_decode))


def single_cache_hit_rate(requests: Sequence[TraceRequest], page_size: int, num_pages: int) -> float:
    """Of one cache as large as all workers' together, through which the requests pass one after the other.

    No placement can do better but by luck: nothing is held twice, and no running request takes room.
    """
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, page_size)
    hits = total = 0
    for request in requests:
        tokens = request.token_ids()
        hashes = hash_pages(tokens, page_size, SALT)
        held = cache.match(hashes[: (len(tokens) - 1) // page_size])
        hits, total = hits + len(held) * page_size, total + len(tokens)
        try:
            pages = [*held, *pool.allocate(len(hashes) - len(held))]
        except OutOfPages:
            pages = held  # longer than the whole cache
        cache.insert(hashes[: len(pages)], pages)
        pool.release(pages)
    return hits / max(1, total)


def failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many requests ended with which error, or have not ended."""
    found: dict[str, int] = {}
    for one in outcomes:
        if not one.is_complete:
            name = type(one.error).__name__ if one.error else "cancelled" if one.num_ends else "not ended"
            found[name] = found.get(name, 0) + 1
    return found
