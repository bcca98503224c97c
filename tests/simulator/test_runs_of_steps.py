"""Tests that decode steps simulated together equal the same steps one by one, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from simulator.check import random_requests, random_spec
from simulator.costs.machine import StepKind, StepSpread
from simulator.costs.step_costs import LinkCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import RequestTokens, TraceRequest
from simulator.traces import SharedPrefixMix

EXACT = LinkCosts(bytes_per_s=1e9, jitter_s=0.0)  # one random stream delays all messages, and there are fewer of them


def history(spec: FleetSpec, seed: int, requests: list[TraceRequest], until_s: float | None = None) -> object:
    """Runs a deployment, and returns what clients and routers can see of it."""
    fleet = SimulatedFleet(spec, seed)
    for request in requests:
        fleet.submit(request)
    if until_s is not None:
        fleet.run(until_s=until_s)
        fleet.sim.run(until_s=until_s)
    else:
        fleet.run()
    router, workers = fleet.router, fleet.workers.values()
    for worker in workers:
        worker.load()
        worker.cache.check_integrity()
    return (
        [
            (outcome.first_token_s, outcome.end_s, outcome.cached_tokens, outcome.computed_by, outcome.decoded_by)
            for outcome in fleet.outcomes
        ],
        [(worker.load(), worker.cache.num_cached, worker.num_computed_tokens) for worker in workers],
        [follower.load for follower in router.followers],
        [router.index.pages_of(worker.worker_id) for worker in workers],
        fleet.links.bytes_moved,
    )


# Seed 8 has a single decode worker of 200 pages of 4 tokens, whose runs evict pages of the texts that they continue.
@pytest.mark.parametrize("seed", range(9))
def test_runs_of_steps_equal_single_steps(seed: int) -> None:
    rng = random.Random(seed)
    spec = replace(random_spec(rng), link_costs=EXACT, admission=None)
    requests = random_requests(rng)
    one_by_one = history(replace(spec, max_run=1), seed, requests)
    for max_run in (2, 64, 1000):
        assert history(replace(spec, max_run=max_run), seed, requests) == one_by_one


def test_runs_of_steps_equal_single_steps_when_their_times_spread() -> None:
    rng = random.Random(5)
    spread = StepSpread(dict.fromkeys(StepKind, (0.5, 1.0, 3.0)), spell_s=0.05)
    spec = replace(random_spec(rng), link_costs=EXACT, admission=None, spread=spread)
    requests = random_requests(rng)
    one_by_one = history(replace(spec, max_run=1), 5, requests)
    assert history(replace(spec, max_run=64), 5, requests) == one_by_one
    assert history(replace(spec, max_run=64, spread=None), 5, requests) != one_by_one


def test_routers_know_the_same_in_the_middle_of_a_run() -> None:
    rng = random.Random(3)
    spec = replace(random_spec(rng), link_costs=EXACT, admission=None, num_prefill=2)
    requests = random_requests(rng)
    for until_s in (1.0, 2.5, 4.2):
        assert _seen(replace(spec, max_run=1), requests, until_s) == _seen(replace(spec, max_run=64), requests, until_s)


def _seen(spec: FleetSpec, requests: list[TraceRequest], until_s: float) -> object:
    fleet = SimulatedFleet(spec, 0)
    for request in requests:
        fleet.submit(request)
    fleet.run(until_s=until_s)
    return [(follower.worker_id, follower.load) for follower in fleet.router.followers]


def test_implicit_tokens_equal_those_of_the_request() -> None:
    request = TraceRequest(3, 0.0, 10, 4, (7, 8, 9), 4)
    tokens = RequestTokens(request, 2)
    spelled = [*[7] * 4, *[8] * 4, *[9] * 2, request.output_token(10), request.output_token(11)]
    assert (list(tokens), len(tokens), tokens[-1], tokens[3:9]) == (spelled, 12, spelled[-1], spelled[3:9])
    tokens.append(0)
    assert tokens[-1] == request.output_token(12)
    assert tokens.copy()[:] == tokens[:]
    with pytest.raises(IndexError):
        tokens[13]


@pytest.mark.parametrize("seed", range(4))
def test_pending_reports_hold_what_messages_would(seed: int) -> None:
    """A fault that changes nothing turns reports into messages; routers must choose the same workers at each moment."""
    mix = SharedPrefixMix(num_requests=150, requests_per_s=4.0 + seed, output_tokens=80, think_s=2.0)
    requests = mix.make(seed)
    spec = FleetSpec(2, 3, page_size=64, prefill_pages=300 + 300 * seed, decode_pages=400)
    waiting, sent = SimulatedFleet(spec, seed), SimulatedFleet(spec, seed)
    sent.sim.at(0.0, lambda: sent.network.cut("nobody", "nobody else"))
    for fleet in (waiting, sent):
        for request in requests:
            fleet.submit(request)
        fleet.run()
    assert _clients_view(waiting) == _clients_view(sent)
    assert [follower.load for follower in waiting.router.followers] == [
        follower.load for follower in sent.router.followers
    ]
    assert waiting.sim.num_events < sent.sim.num_events


def _clients_view(fleet: SimulatedFleet) -> list[tuple[object, ...]]:
    return [
        (outcome.first_token_s, outcome.end_s, outcome.cached_tokens, outcome.computed_by) for outcome in fleet.outcomes
    ]
