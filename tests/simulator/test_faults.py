"""Tests small deployments in virtual time with seeded faults, and that the invariants detect planted bugs."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kv_transfer.session.transfer_session import TransferSession
from router.dispatch.completion_core import CompletionCore
from router.routing.costs.inflight import InflightLedger
from simulator import invariants
from simulator.check import random_requests, random_spec, run_seed
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import TraceRequest
from simulator.world.faults import FaultRates


@pytest.mark.parametrize("first", [0, 20])  # `make simulate` runs thousands
def test_invariants_hold_under_random_faults(first: int) -> None:
    runs = [run_seed(seed) for seed in range(first, first + 20)]
    assert {run.seed: (run.problems, run.faults) for run in runs if run.problems} == {}
    assert sum(run.num_complete for run in runs) > 0.8 * sum(run.num_requests for run in runs)


def test_random_runs_cover_every_feature_of_a_deployment() -> None:
    specs = [random_spec(random.Random(seed)) for seed in range(60)]
    assert {spec.max_run > 1 for spec in specs} == {spec.pull for spec in specs} == {True, False}
    assert {spec.num_routers for spec in specs} == {1, 2, 3}
    assert {bool(spec.host_pages) for spec in specs} == {True, False}


def test_clients_of_a_lost_router_continue_at_another_one() -> None:
    fleet = SimulatedFleet(FleetSpec(1, 2, num_routers=2), 0)
    outcomes = [fleet.submit(TraceRequest(number, 1.0, 64, 200, (number,), 64)) for number in range(8)]
    fleet.sim.at(2.0, lambda: fleet.kill_router("router-1"))
    fleet.sim.at(6.0, lambda: fleet.start_router("router-1"))
    fleet.run()
    fleet.sim.run(until_s=fleet.sim.now_s + invariants.SETTLE_S)
    assert [outcome.num_resumed for outcome in outcomes] == [0, 1] * 4
    assert all(outcome.is_complete and outcome.num_tokens == 200 for outcome in outcomes)
    assert not any(outcome.num_wrong_tokens for outcome in outcomes)
    assert invariants.at_the_end(fleet) == []


def test_routers_count_what_their_peers_have_sent() -> None:
    fleet = SimulatedFleet(FleetSpec(0, 2, num_routers=2, report_interval_s=10.0), 0)
    fleet.sim.run(until_s=1.0)
    fleet.submit(TraceRequest(0, 1.0, 6400, 10, (0,), 6400))
    fleet.sim.run(until_s=1.05)
    first, second = fleet.routers.values()
    worker_id = fleet.outcomes[0].decoded_by[0]
    assert first.ledger.sent_to(worker_id).num_requests == 1
    assert second.ledger.sent_to(worker_id).num_requests == 0
    assert second.peers.sent_to(worker_id) == first.peers.sent_to(worker_id)


def test_a_prefix_evicted_to_host_memory_is_copied_back() -> None:
    spec = FleetSpec(0, 1, 64, decode_pages=20, host_pages=100)
    fleet = SimulatedFleet(spec, 0)
    for number, block in enumerate((1, 2, 3, 1)):
        fleet.submit(TraceRequest(number, 1.0 + 5.0 * number, 640, 2, (block,), 640))
    fleet.run()
    fleet.sim.run(until_s=fleet.sim.now_s + invariants.SETTLE_S)
    again = fleet.outcomes[-1]
    assert again.cached_tokens == 576
    worker = fleet.workers["decode-0"]
    assert worker.cache.stats.host_hits == 9
    assert invariants.at_the_end(fleet) == []


def test_without_faults_every_request_completes() -> None:
    none = FaultRates(
        kills=0,
        freezes=0,
        cuts=0,
        slow_links=0,
        event_faults=0,
        abandons=0,
        ranks=0,
        spares=0,
        router_kills=0,
    )
    for seed in range(10):
        run = run_seed(seed, none)
        assert (run.problems, run.num_complete) == ([], run.num_requests), seed


def test_the_same_seed_gives_the_same_run() -> None:
    def outcomes(seed: int) -> list[tuple[object, ...]]:
        rng = random.Random(seed)
        fleet = SimulatedFleet(random_spec(rng), seed)
        for request in random_requests(rng):
            fleet.submit(request)
        fleet.run()
        return [(each.first_token_s, each.end_s, each.computed_by, *each.decoded_by) for each in fleet.outcomes]

    assert outcomes(3) == outcomes(3)
    assert run_seed(5) == run_seed(5)


def test_a_ledger_that_does_not_settle_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InflightLedger, "settle", lambda self, keys: None)
    monkeypatch.setattr(InflightLedger, "on_report", lambda self, worker_id, now_s: None)
    assert any("in flight to" in problem for problem in run_seed(1).problems)


def test_a_lost_index_event_is_detected() -> None:
    rng = random.Random(2)
    fleet = SimulatedFleet(random_spec(rng), 2)
    for request in random_requests(rng):
        fleet.submit(request)
    fleet.run()
    fleet.sim.run(until_s=fleet.sim.now_s + invariants.SETTLE_S)
    assert invariants.at_the_end(fleet) == []
    name = next(name for name, worker in fleet.workers.items() if worker.cache.num_cached)
    fleet.router.index.drop(fleet.workers[name].worker_id)
    assert any(name in problem for problem in invariants.at_the_end(fleet))


# Bugs planted in code that the product runs, each with seeds that find it. `make simulate` finds each within 500.


def _problems(seeds: Iterable[int]) -> list[str]:
    return [problem for seed in seeds for problem in run_seed(seed).problems]


def test_a_leak_in_the_ledger_of_the_real_dispatch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: a request that is re-dispatched or cancelled before its first token keeps its bookings."""

    def forgetful(self: CompletionCore) -> None:
        if self.num_generated:
            self._ledger.settle(self._credits)
        self._credits = []

    monkeypatch.setattr(CompletionCore, "_settle", forgetful)
    assert any("ledger still has" in problem for problem in _problems((9, 27)))


def test_a_cancellation_that_the_real_dispatch_skips_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CompletionCore.release
    monkeypatch.setattr(CompletionCore, "release", lambda self: bool(release(self) and self.num_generated))
    assert any("after it had ended" in problem for problem in _problems((9, 41)))


def test_a_page_that_the_real_session_frees_while_it_is_fenced_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: the receiver believes that an aborted transfer's sender has stopped writing."""
    abort = TransferSession.on_abort
    monkeypatch.setattr(TransferSession, "on_abort", lambda self: [*abort(self), *self.on_sender_dead()])
    assert any("not fenced" in problem for problem in _problems((7, 11)))
