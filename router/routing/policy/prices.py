"""Prices a pair of workers for one request, in seconds and by stage. Pure. It prices the choices of every policy.

The stages: wait in the prefill queue, compute the uncached tokens, transfer what the decode worker lacks, wait on the
decode worker for pages and a slot, decode. One more sequence also lengthens the decode worker's steps for all others;
that harm counts as well. `cost_terms` weighs these stages, and each `all_*` function computes one for every worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.scheduling.chunk_costs import ChunkCosts, costs_of_chunks
from penstock.types import WorkerId
from router.routing.policy.interface import DEFAULT_CHUNK_TOKENS, PairScore, PlacementDemand, WorkerView

_ADAPTER_LOAD_S = 0.2  # assumed for a worker that has not loaded an adapter yet
_HOST_BYTE_S = 1 / 8e9  # to copy one byte back from host memory


def prefill_s(demand: PlacementDemand, view: WorkerView) -> float:
    """Returns the time in which the worker computes the prompt, including copies back from lower tiers."""
    return all_prefill_s(demand, [view])[0]


def all_prefill_s(demand: PlacementDemand, views: Sequence[WorkerView]) -> list[float]:
    """Returns `prefill_s` of each view. Inlined, because every request evaluates it for every worker."""
    num_tokens, cached = demand.num_tokens, demand.cached_tokens.get
    costs = []
    for view in views:
        cost = view.costs.prefill
        uncached = num_tokens - cached(view.worker_id, 0) or 1  # never negative: it caches at most the prompt
        steps = -(-uncached // (view.limits.chunk_tokens or DEFAULT_CHUNK_TOKENS))
        costs.append(steps * cost.fixed_s + uncached * (cost.token_s + cost.context_s * (num_tokens - uncached / 2)))
    if copied := demand.host_tokens:
        host_byte_s = demand.token_bytes * _HOST_BYTE_S
        return [cost_s + copied.get(view.worker_id, 0) * host_byte_s for cost_s, view in zip(costs, views, strict=True)]
    return costs


def all_prefill_like_s(demand: PlacementDemand, views: Sequence[WorkerView], like: WorkerView) -> list[float]:
    """Returns each view's prefill time with its own cache but the speed of `like`."""
    num_tokens, cached, chunk_tokens = demand.num_tokens, demand.cached_tokens.get, like.chunk_tokens
    cost = like.costs.prefill
    fixed_s, context_s, token_s = cost.fixed_s, cost.context_s / 2, cost.token_s + cost.context_s * num_tokens
    return [
        -(-uncached // chunk_tokens) * fixed_s + uncached * (token_s - uncached * context_s)
        for uncached in [num_tokens - cached(view.worker_id, 0) or 1 for view in views]
    ]


def all_local(demand: PlacementDemand, views: Sequence[WorkerView]) -> list[ChunkCosts]:
    """Returns what each decode worker takes to compute the prompt itself; copies from lower tiers come first."""
    num_tokens, cached, copied = demand.num_tokens, demand.cached_tokens.get, demand.host_tokens.get
    found = []
    for view in views:
        uncached = num_tokens - cached(view.worker_id, 0) or 1
        queued = view.queued_tokens
        is_busy = view.num_requests > 0 or queued > 0
        costs = costs_of_chunks(view.chunks, uncached, num_tokens - uncached, queued, is_busy)
        if demand.host_tokens:
            copied_s = copied(view.worker_id, 0) * demand.token_bytes * _HOST_BYTE_S
            costs = costs._replace(queue_s=costs.queue_s + copied_s)
        found.append(costs)
    return found


def all_decode_s(
    demand: PlacementDemand, views: Sequence[WorkerView], weight: float, delay_weight: float
) -> list[float]:
    """Returns the cost of decoding on each worker.

    It is the sum of `decode_queue_s`, of `weight` times the time to decode, harm included, and of `delay_weight` times
    `page_delay_s`. On each worker the new context lengthens the steps of the mean number of sequences. With each
    worker's own number, long contexts would gather where few sequences run, and such a worker keeps more prompts to
    compute itself, beside which its sequences are slow.
    """
    output_tokens, num_tokens = demand.output_tokens * weight, demand.num_tokens
    cached = demand.cached_tokens.get
    num_slowed = num_slowed_sequences(sum([view.num_requests for view in views]), len(views))
    costs = []
    for view in views:
        seconds = output_tokens * (view.token_price + num_tokens * (view.costs.decode.context_s * num_slowed))
        free = view.load.free_pages - view.sent.num_pages
        missing = num_tokens - cached(view.worker_id, 0) or 1
        if missing > free * view.page_size or view.num_requests >= (view.limits.max_running or view.num_requests + 1):
            seconds += decode_queue_s(demand, view) + delay_weight * page_delay_s(demand, view)
        costs.append(seconds)
    return costs


def num_slowed_sequences(num_requests: int, num_workers: int) -> float:
    """Returns how many sequences a new context slows down: itself, and those of its worker for half its output."""
    return 1 + num_requests / max(1, num_workers) / 2


def adapter_waits_s(demand: PlacementDemand, views: Sequence[WorkerView]) -> list[float]:
    """Returns how long each worker takes to load the request's adapter; 0 if it is loaded or being loaded."""
    if not demand.adapter:
        return [0.0] * len(views)
    return [
        0.0
        if demand.adapter in view.load.adapters or view.worker_id in demand.adapter_sent
        else view.load.adapter_load_s or _ADAPTER_LOAD_S
        for view in views
    ]


def transfer_bytes(demand: PlacementDemand, view: WorkerView) -> float:
    """Returns the bytes of KV that a decode worker lacks."""
    return demand.uncached_on(view.worker_id) * demand.token_bytes


def decode_queue_s(demand: PlacementDemand, view: WorkerView) -> float:
    """Returns the time until the worker's running sequences have freed enough pages and a slot.

    Requests already waiting come first. They need the pages that were promised to them, or as many as running ones hold
    if that is more: routers do not know what preempted sequences and other routers' older requests need.
    """
    load, num_requests = view.load, view.num_requests
    if not num_requests:
        return 0.0
    wait_s = 0.0
    # A running sequence has half its output left on average, and the sequences end evenly over that time.
    remaining_s = demand.output_tokens * view.step_s / 2
    if load.total_pages:
        missing = _num_pages(demand, view) + view.sent.num_pages - load.free_pages
        if missing > 0:
            used = max(1, load.total_pages - load.free_pages)
            missing += max(0, load.num_waiting * used // max(1, load.num_running) - view.sent.num_pages)
            wait_s = remaining_s * missing / used
    limit = view.limits.max_running
    if limit and num_requests >= limit:
        wait_s = max(wait_s, remaining_s * (num_requests + 1 - limit) / limit)
    return wait_s


def page_delay_s(demand: PlacementDemand, view: WorkerView) -> float:
    """Returns the summed delay of the requests that wait for pages, caused by the pages that this one takes."""
    load = view.load
    pages = _num_pages(demand, view)
    if not load.num_waiting or pages + view.sent.num_pages <= load.free_pages:
        return 0.0
    return load.num_waiting * demand.output_tokens * view.step_s * pages / max(1, load.total_pages)


def _num_pages(demand: PlacementDemand, view: WorkerView) -> int:
    """Returns the pages that the request would take on the worker, beyond its cached ones."""
    return -(-view.limits.held_tokens(demand.uncached_on(view.worker_id)) // view.page_size)


def harm_s(demand: PlacementDemand, view: WorkerView) -> float:
    """Returns the summed delay of the worker's sequences: longer steps for half their output, on average."""
    cost = view.costs.decode
    longer_s = cost.token_s + cost.context_s * demand.num_tokens
    return view.num_requests * longer_s * demand.output_tokens / 2


def transfer_between_s(demand: PlacementDemand, prefill: WorkerId, decode: WorkerView) -> float:
    """Returns the time until the link has moved the request's bytes and all bytes ahead of them."""
    links = demand.links
    num_bytes = transfer_bytes(demand, decode) + links.bytes_ahead(prefill, decode.worker_id)
    return links.cost(prefill, decode.worker_id).transfer_s(num_bytes)


def price(demand: PlacementDemand, decode: WorkerView, prefill: WorkerView | None) -> PairScore:
    """Prices one pair, or a decode worker that computes the prompt itself. `total_s` is the unweighted sum."""
    computed_by = prefill or decode
    harm = harm_s(demand, decode)
    if prefill is None:
        local, transfer_s = all_local(demand, [decode])[0], 0.0
        queue_s, compute_s = local.queue_s, local.busy_s
        harm += local.harm_s(decode.num_requests, 0.0, decode.limits.itl_target_s)
    else:
        queue_s, compute_s = prefill.queue_s, prefill_s(demand, prefill)
        transfer_s = transfer_between_s(demand, prefill.worker_id, decode)
    wait_s = decode_queue_s(demand, decode)
    own_s = demand.output_tokens * (decode.step_s + demand.num_tokens * decode.costs.decode.context_s)
    return PairScore(
        prefill=prefill.worker_id if prefill else None,
        decode=decode.worker_id,
        queue_s=queue_s,
        prefill_s=compute_s,
        transfer_s=transfer_s,
        decode_queue_s=wait_s,
        decode_s=own_s,
        harm_s=harm,
        bonus_s=0.0,
        total_s=queue_s + compute_s + transfer_s + wait_s + own_s + harm,
        prefill_cached_tokens=demand.cached_tokens.get(computed_by.worker_id, 0),
        decode_cached_tokens=demand.cached_tokens.get(decode.worker_id, 0),
    )
