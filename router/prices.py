"""What a pair of workers costs one request, in seconds and by stage. Pure; every policy's choice is priced by it.

Stages: wait in the prefill queue, compute what no cache there holds, move what the decode worker lacks, wait there for
pages and a place, decode. One more sequence makes the steps of all the others there longer; that harm is a price too.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.types import WorkerId
from router.views import DEFAULT_CHUNK_TOKENS, Demand, Score, WorkerView

_HOST_BYTE_S = 1 / 8e9  # to copy a page back from host memory


def prefill_s(demand: Demand, view: WorkerView) -> float:
    """To compute the prompt there, what lower tiers hold copied back first."""
    worker_id = view.worker_id
    uncached = demand.uncached_on(worker_id)
    seconds = view.costs.prefill.prefill_s(uncached, demand.num_tokens, view.chunk_tokens)
    copied = demand.host_tokens.get(worker_id, 0) if demand.host_tokens else 0
    return seconds + copied * demand.token_bytes * _HOST_BYTE_S


def all_prefill_s(demand: Demand, views: Sequence[WorkerView]) -> list[float]:
    """`prefill_s` of each. Written out, because it is reckoned for every worker of every request."""
    num_tokens, cached = demand.num_tokens, demand.cached_tokens.get
    costs = []
    for view in views:
        cost = view.costs.prefill
        uncached = num_tokens - cached(view.worker_id, 0) or 1  # no more can be cached than there is
        steps = -(-uncached // (view.limits.chunk_tokens or DEFAULT_CHUNK_TOKENS))
        costs.append(steps * cost.fixed_s + uncached * (cost.token_s + cost.context_s * (num_tokens - uncached / 2)))
    if copied := demand.host_tokens:
        host_byte_s = demand.token_bytes * _HOST_BYTE_S
        return [cost_s + copied.get(view.worker_id, 0) * host_byte_s for cost_s, view in zip(costs, views, strict=True)]
    return costs


def all_prefill_like_s(demand: Demand, views: Sequence[WorkerView], like: WorkerView) -> list[float]:
    """What computing were to take if each had its own cache and computed as `like` does."""
    num_tokens, cached, chunk_tokens = demand.num_tokens, demand.cached_tokens.get, like.chunk_tokens
    cost = like.costs.prefill
    fixed_s, context_s, token_s = cost.fixed_s, cost.context_s / 2, cost.token_s + cost.context_s * num_tokens
    return [
        -(-uncached // chunk_tokens) * fixed_s + uncached * (token_s - uncached * context_s)
        for uncached in [num_tokens - cached(view.worker_id, 0) or 1 for view in views]
    ]


def all_decode_s(demand: Demand, views: Sequence[WorkerView], weight: float) -> list[float]:
    """Of each: `admission_s`, and weighted what decoding there costs, harm included."""
    output_tokens, num_tokens = demand.output_tokens * weight, demand.num_tokens
    cached = demand.cached_tokens.get
    costs = []
    for view in views:
        seconds = output_tokens * (view.token_price + num_tokens * view.context_price)
        free = view.load.free_pages - view.sent.num_pages
        lacking = num_tokens - cached(view.worker_id, 0) or 1
        if lacking > free * view.page_size or view.num_requests >= (view.limits.max_running or view.num_requests + 1):
            seconds += admission_s(demand, view)
        costs.append(seconds)
    return costs


def lacking_bytes(demand: Demand, view: WorkerView) -> float:
    """That must move to a decode worker."""
    return demand.uncached_on(view.worker_id) * demand.token_bytes


def admission_s(demand: Demand, view: WorkerView) -> float:
    """Until sequences that run there now have left enough pages and a place."""
    load, num_requests = view.load, view.num_requests
    if not num_requests:
        return 0.0
    wait_s = 0.0
    # A sequence that runs has half its output before it, on average; they end one by one until then.
    life_s = demand.output_tokens * view.step_s / 2
    if load.total_pages:
        missing = -(-demand.uncached_on(view.worker_id) // view.page_size) + view.sent.num_pages - load.free_pages
        if missing > 0:
            wait_s = life_s * min(1.0, missing / max(1, load.total_pages - load.free_pages))
    limit = view.limits.max_running
    if limit and num_requests >= limit:
        wait_s = max(wait_s, life_s * (num_requests + 1 - limit) / limit)
    return wait_s


def harm_s(demand: Demand, view: WorkerView) -> float:
    """The sequence lengthens the steps of all that run there for as long as they run, half their output on average."""
    cost = view.costs.decode
    longer_s = cost.token_s + cost.context_s * demand.num_tokens
    return view.num_requests * longer_s * demand.output_tokens / 2


def price(demand: Demand, decode: WorkerView, prefill: WorkerView | None) -> Score:
    """Of one pair, or of a decode worker that computes the prompt itself; `total_s` is the plain sum."""
    computed_by = prefill or decode
    compute_s = prefill_s(demand, computed_by)
    harm = harm_s(demand, decode)
    transfer_s = 0.0
    if prefill is None:
        harm += decode.num_requests * compute_s  # every chunk delays everybody who decodes there
    else:
        transfer_s = transfer_between_s(demand, prefill.worker_id, decode)
    wait_s = admission_s(demand, decode)
    own_s = demand.output_tokens * (decode.step_s + demand.num_tokens * decode.costs.decode.context_s)
    total_s = computed_by.queue_s + compute_s + transfer_s + wait_s + own_s + harm
    cached = demand.cached_tokens
    return Score(
        prefill.worker_id if prefill else None,
        decode.worker_id,
        computed_by.queue_s,
        compute_s,
        transfer_s,
        wait_s,
        own_s,
        harm,
        0.0,
        total_s,
        cached.get(computed_by.worker_id, 0),
        cached.get(decode.worker_id, 0),
    )


def transfer_between_s(demand: Demand, prefill: WorkerId, decode: WorkerView) -> float:
    """Bytes that go over the link before ours count as our own."""
    links = demand.links
    num_bytes = lacking_bytes(demand, decode) + links.bytes_ahead(prefill, decode.worker_id)
    return links.cost(prefill, decode.worker_id).transfer_s(num_bytes)
