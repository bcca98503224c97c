"""What a pair of workers costs one request, in seconds and by stage. Pure; every policy's choice is priced by it.

Stages: wait in the prefill queue, compute what no cache there holds, move what the decode worker lacks, wait there for
pages and a place, decode. One more sequence makes the steps of all the others there longer; that harm is a price too.
"""

from __future__ import annotations

from penstock.types import WorkerId
from router.views import Demand, Score, WorkerView

_HOST_BYTE_S = 1 / 8e9  # to copy a page back from host memory


def prefill_s(demand: Demand, view: WorkerView) -> float:
    """To compute the prompt there, what lower tiers hold copied back first."""
    worker_id = view.worker_id
    uncached = demand.uncached_on(worker_id)
    seconds = view.costs.prefill.prefill_s(uncached, demand.num_tokens, view.chunk_tokens)
    copied = demand.host_tokens.get(worker_id, 0) if demand.host_tokens else 0
    return seconds + copied * demand.token_bytes * _HOST_BYTE_S


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
    life_s = demand.output_tokens * decode_step_s(view) / 2
    if load.total_pages:
        missing = -(-demand.uncached_on(view.worker_id) // view.page_size) + view.sent.num_pages - load.free_pages
        if missing > 0:
            wait_s = life_s * min(1.0, missing / max(1, load.total_pages - load.free_pages))
    limit = view.limits.max_running
    if limit and num_requests >= limit:
        wait_s = max(wait_s, life_s * (num_requests + 1 - limit) / limit)
    return wait_s


def decode_step_s(view: WorkerView, more_tokens: int = 0) -> float:
    """With one sequence more than it has, of so many tokens."""
    cost = view.costs.decode
    running = view.num_requests + 1
    if view.limits.max_running:
        running = min(running, view.limits.max_running)
    return cost.fixed_s + running * cost.token_s + (view.kv_tokens + more_tokens) * cost.context_s


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
    own_s = demand.output_tokens * decode_step_s(decode, demand.num_tokens)
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
