"""Tests that running sequences migrate in virtual time without losing a token, and what remains when they cannot."""

from __future__ import annotations

import pytest

from penstock.types import Role
from simulator import invariants
from simulator.costs.step_costs import LinkCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import Outcome, TraceRequest
from simulator.workers.decode_model import DecodeModel

SPEC = FleetSpec(1, 2, 16, 400, 400)


def running(spec: FleetSpec, num_output: int = 400) -> tuple[SimulatedFleet, list[Outcome]]:
    """Returns a deployment whose first decode worker runs some sequences."""
    fleet = SimulatedFleet(spec, 0)
    outcomes = [fleet.submit(TraceRequest(number, 1.0, 200, num_output, (number,), 200)) for number in range(6)]
    fleet.sim.run(until_s=2.0)
    assert any(outcome.decoded_by == ["decode-0"] for outcome in outcomes)
    return fleet, outcomes


def settle(fleet: SimulatedFleet) -> None:
    fleet.run()
    fleet.sim.run(until_s=fleet.sim.now_s + invariants.SETTLE_S)
    assert invariants.at_the_end(fleet) == []


@pytest.mark.parametrize("max_run", [1, 64])
def test_a_drained_worker_empties_soon_and_no_request_fails(max_run: int) -> None:
    fleet, outcomes = running(FleetSpec(1, 2, 16, 400, 400, max_run=max_run))
    fleet.retire("decode-0")
    fleet.migrate_away("decode-0")
    fleet.sim.run(until_s=2.5)
    source = fleet.workers["decode-0"]
    assert isinstance(source, DecodeModel)
    assert source.num_held == 0
    assert fleet.num_migrated == sum(outcome.decoded_by == ["decode-0", "decode-1"] for outcome in outcomes) > 0
    settle(fleet)
    assert all(
        outcome.is_complete and outcome.num_tokens == 400 and not outcome.num_redispatches for outcome in outcomes
    )
    assert not any(outcome.num_wrong_tokens for outcome in outcomes)


def test_sequences_stay_if_the_target_has_no_room() -> None:
    fleet, outcomes = running(SPEC)
    target = fleet.workers["decode-1"]
    taken = target.pool.allocate(target.pool.num_available)
    source = fleet.workers["decode-0"]
    assert isinstance(source, DecodeModel)
    assert isinstance(target, DecodeModel)
    for submission in source.running:
        source.migrations.begin(submission, target.migrations)
    fleet.sim.run(until_s=2.5)
    assert fleet.num_migrated == source.migrations.num_open == 0
    target.pool.release(taken)
    settle(fleet)
    assert all(outcome.is_complete and len(outcome.decoded_by) == 1 for outcome in outcomes)


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
def test_a_worker_that_dies_while_pages_are_copied_leaves_nothing_fenced(name: str) -> None:
    slow = LinkCosts(bytes_per_s=2e8)
    fleet, outcomes = running(FleetSpec(1, 2, 16, 400, 400, link_costs=slow))
    fleet.migrate_away("decode-0")
    fleet.sim.run(until_s=2.02)
    assert fleet.num_migrated == 0
    fleet.kill(name)
    fleet.sim.run(until_s=3.0)
    fleet.start_worker(name)
    settle(fleet)
    assert all(
        outcome.is_complete and outcome.num_tokens == 400 and not outcome.num_wrong_tokens for outcome in outcomes
    )


def test_a_migrated_sequence_whose_client_has_left_is_dropped() -> None:
    fleet, outcomes = running(SPEC, 4000)
    fleet.migrate_away("decode-0")
    fleet.sim.after(0.012, lambda: [fleet.abandon(outcome) for outcome in outcomes])
    settle(fleet)
    assert all(outcome.abandoned for outcome in outcomes)


def test_only_running_sequences_of_decode_workers_migrate() -> None:
    fleet, _ = running(SPEC)
    fleet.migrate_away("prefill-0")
    fleet.migrate_away("nobody")
    assert fleet.roles["prefill-0"] is Role.PREFILL
    settle(fleet)
    assert fleet.num_migrated == 0
