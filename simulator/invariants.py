"""Checks the invariants of every run, whatever faults it had. A check returns descriptions of the violations, if
any.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import DeadlineExceeded, Unavailable
from router.routing.costs.inflight import NO_WORK
from simulator.fleet import SimulatedFleet
from simulator.request import Outcome
from simulator.routers.follower_model import Worker
from simulator.routers.router_model import RouterModel
from simulator.workers.decode_model import DecodeModel

SETTLE_S = 60.0  # time after the last request for reconnects, fences of lost senders and heartbeats


def after_event(fleet: SimulatedFleet) -> None:
    """Checks the invariants that are cheap enough to check after each event. Raises AssertionError."""
    for worker in fleet.workers.values():
        if isinstance(worker, DecodeModel):
            assert not worker.transfers.num_bad_writes, f"{worker.worker_id}: a page was written that was not fenced"
        assert worker.host is None or not worker.host.num_bad_reads, f"{worker.worker_id}: read an empty host page"
        assert worker.pool.num_available >= 0
    assert fleet.links.bytes_in_flight >= 0


def at_the_end(fleet: SimulatedFleet) -> list[str]:
    """Checks a run in which every request has ended and faults have been over for `SETTLE_S`."""
    violations = [problem for outcome in fleet.outcomes for problem in _check_outcome(outcome)]
    violations += [problem for worker in fleet.workers.values() for problem in _check_worker(worker)]
    for router in fleet.routers.values():
        router.read_reports()
        violations += [f"{router.node.name}: {problem}" for problem in _check_router(fleet, router)]
    return violations


def _check_outcome(outcome: Outcome) -> Iterator[str]:
    request, error = outcome.request, outcome.error
    name = f"request {request.number}"
    if outcome.num_ends != 1:
        yield f"{name} ended {outcome.num_ends} times"
    if outcome.num_wrong_tokens:
        yield f"{name} got {outcome.num_wrong_tokens} tokens of other requests"
    if outcome.num_tokens > request.num_output_tokens:
        yield f"{name} got {outcome.num_tokens} tokens of {request.num_output_tokens}"
    if error is None:
        if outcome.num_tokens < (outcome.granted_tokens or 0) and not outcome.abandoned:
            yield f"{name} ended without error after {outcome.num_tokens} tokens of {request.num_output_tokens}"
    elif isinstance(error, DeadlineExceeded):
        yield f"{name} starved: {error}"  # deadlines are far longer than every fault
    elif not isinstance(error, Unavailable):
        yield f"{name} ended with {error!r}"
    elif not error.retry_after_s:
        yield f"{name} was refused without a hint: {error}"


def _check_worker(worker: Worker) -> Iterator[str]:
    name, pool = worker.worker_id, worker.pool
    try:
        worker.cache.check_integrity()
    except AssertionError as error:
        yield f"{name}: {error}"
    if pool.num_available != pool.num_pages:
        yield f"{name}: {pool.num_pages - pool.num_available} pages leaked, {pool.num_fenced} of them fenced"
    if isinstance(worker, DecodeModel):
        if worker.num_held or worker.scheduler.num_running or worker.scheduler.num_waiting:
            yield f"{name}: holds {worker.num_held} requests"
        if worker.migrations.num_open:
            yield f"{name}: {worker.migrations.num_open} migrations are open"
        if worker.transfers.num_open:
            yield f"{name}: {worker.transfers.num_open} transfers are open"
    elif worker.num_open or worker.scheduler.num_running or worker.scheduler.num_queued:
        yield f"{name}: {worker.num_open} jobs are open"


def _check_router(fleet: SimulatedFleet, router: RouterModel) -> Iterator[str]:
    yield from router.late
    router.index.check_integrity()
    if router.gate is not None and router.gate.admission.num_inside:
        yield f"{router.gate.admission.num_inside} requests are still admitted"
    if router.num_open:
        yield f"holds {router.num_open} requests"
    for name, worker in fleet.workers.items():
        worker_id = worker.worker_id
        if router.ledger.sent_to(worker_id) != NO_WORK:
            yield f"its ledger still has {router.ledger.sent_to(worker_id)} in flight to {name}"
        elif router.peers.sent_to(worker_id) != NO_WORK:
            yield f"believes that its peers have {router.peers.sent_to(worker_id)} in flight to {name}"
        for other in fleet.workers.values():
            if num_bytes := router.ledger.link_bytes((worker_id, other.worker_id)):
                yield f"its ledger still has {num_bytes} bytes on the link from {name} to {other.worker_id}"
        cached = [page for event in worker.events.read(0).events for page in event.hashes]
        known, held = router.index.pages_by_tier(worker_id), worker.cache.num_cached
        missing = sum(worker_id not in router.index.match([page]) for page in cached)
        if known[0] != held or sum(known) != len(cached) or missing:
            yield f"the index knows {known} pages of {name} by tier, of {held} and {len(cached)}, and lacks {missing}"
    if not all(follower.takes_work for follower in router.followers):
        yield f"out of reach: {[follower.worker_id for follower in router.followers if not follower.takes_work]}"
