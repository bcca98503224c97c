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
from simulator.fleet import SimulatedFleet
from simulator.workers.transfers import TransferModel
from simulator.world.faults import FaultRates


@pytest.mark.parametrize("first", [0, 20])  # `make simulate` runs thousands
def test_invariants_hold_under_random_faults(first: int) -> None:
    runs = [run_seed(seed) for seed in range(first, first + 20)]
    assert {run.seed: (run.problems, run.faults) for run in runs if run.problems} == {}
    assert sum(run.num_complete for run in runs) > 0.8 * sum(run.num_requests for run in runs)


def test_without_faults_every_request_completes() -> None:
    none = FaultRates(kills=0, freezes=0, cuts=0, slow_links=0, event_faults=0, abandons=0, ranks=0, spares=0)
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


def test_a_fence_that_is_lifted_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the worst bug: a lost sender's pages are reused while it may still write them."""
    fail = TransferModel._fail

    def lift_at_once(self: TransferModel, transfer, error, effects=()) -> None:  # type: ignore[no-untyped-def]
        fail(self, transfer, error, [*effects, *transfer.session.on_sender_dead()])

    monkeypatch.setattr(TransferModel, "_fail", lift_at_once)
    rates = FaultRates(freezes=6, kills=0, longest_s=6.0, slow_links=6)
    assert any("not fenced" in problem for seed in range(30) for problem in run_seed(seed, rates).problems)


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
    """Plants: a request that is re-dispatched or cancelled before its first token keeps what it was booked as."""

    def forgetful(self: CompletionCore) -> None:
        if self.num_generated:
            self._ledger.settle(self._credits)
        self._credits = []

    monkeypatch.setattr(CompletionCore, "_settle", forgetful)
    assert any("ledger still has" in problem for problem in _problems((1, 8)))


def test_a_cancellation_that_the_real_dispatch_skips_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CompletionCore.release
    monkeypatch.setattr(CompletionCore, "release", lambda self: bool(release(self) and self.num_generated))
    assert any("after it had ended" in problem for problem in _problems((17, 30)))


def test_a_page_that_the_real_session_frees_while_it_is_fenced_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: the receiver believes that an aborted transfer's sender has stopped writing."""
    abort = TransferSession.on_abort
    monkeypatch.setattr(TransferSession, "on_abort", lambda self: [*abort(self), *self.on_sender_dead()])
    assert any("not fenced" in problem for problem in _problems((55, 60)))
