"""Runs a small deployment with faults for each seed and checks invariants: `python -m simulator.check --seeds 2000`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.scaling.signals import PoolBounds
from penstock.config import DecodeConfig, PrefillConfig
from penstock.config.admission import AdmissionConfig, OverloadConfig
from penstock.config.autoscaler import AutoscalerConfig, SloConfig
from penstock.types import Role
from simulator import invariants
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import TraceRequest
from simulator.world.faults import FaultRates, schedule_faults
from simulator.world.scaling_model import ScalingModel

_FAULTS_UNTIL_S = 8.0
_TIMEOUT_S = 300.0
_SCALED_SHARE = 0.5  # share of the runs in which the autoscaler changes the pools
_BOUNDS = {role: PoolBounds(1, 3) for role in Role}
# Short intervals and short histories, so that pools change within seconds.
_EAGER_SCALING = AutoscalerConfig(
    mode="on",
    slo=SloConfig(ttft_s=0.1, itl_s=0.02),
    interval_s=0.25,
    history_s=1.0,
    up_cooldown_s=0.5,
    down_cooldown_s=0.5,
    down_after_s=4.0,
    flip_cooldown_s=0.5,
    flip_after_s=0.25,
    start_s=0.5,
)


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """The result of one seed."""

    seed: int
    faults: list[str]
    problems: list[str]
    num_requests: int
    num_complete: int
    num_events: int
    num_flips: int  # flips by the autoscaler
    num_resizes: int
    num_migrated: int  # sequences


def random_spec(rng: random.Random) -> FleetSpec:
    """Returns few workers, small pools and slow links, so that rare events of large deployments happen all the time."""
    page_size = rng.choice((4, 16))
    max_sequences = rng.choice((4, 16))
    return FleetSpec(
        num_prefill=rng.choice((0, 1, 2, 3)),
        num_decode=rng.choice((1, 2, 3)),
        page_size=page_size,
        prefill_pages=rng.choice((50, 200)) * 16 // page_size,
        decode_pages=rng.choice((50, 200)) * 16 // page_size,
        prefill_costs=PrefillCosts(0.005, 0.0005, 1e-7),
        decode_costs=DecodeCosts(0.01, 0.0002, 1e-6, PrefillCosts(0.0, 0.0005, 1e-7)),
        link_costs=LinkCosts(bytes_per_s=1e9),
        prefill=PrefillConfig(max_batch_tokens=rng.choice((32, 256)), max_batch_sequences=rng.choice((1, 8))),
        decode=DecodeConfig(max_batch_sequences=max_sequences, max_batch_tokens=rng.choice((32, 256))),
        policy=rng.choice(("kv-aware", "least-loaded", "round-robin", "random", "consistent-hash")),
        admission=rng.choice(
            (None, AdmissionConfig(), AdmissionConfig(overload=OverloadConfig(shed=True, max_tokens=32)))
        ),
        timeout_s=_TIMEOUT_S,
        max_run=rng.choice((1, 1, 8, 64)),
        pull=rng.random() < 0.3,
        host_pages=rng.choice((0, 0, 20, 200)),
        num_routers=rng.choice((1, 1, 2, 3)),
    )


def random_requests(rng: random.Random) -> list[TraceRequest]:
    """Returns prompts with shared prefixes that arrive within a few seconds."""
    block_tokens = 16
    requests = []
    for number in range(rng.randint(5, 40)):
        family = rng.randrange(4)
        shared = [family * 100 + index for index in range(rng.randint(0, 12))]
        blocks = (*shared, *(1000 + number * 10 + index for index in range(rng.randint(1, 8))))
        num_input = len(blocks) * block_tokens - rng.randrange(block_tokens)
        arrival_s = rng.uniform(0.2, _FAULTS_UNTIL_S)
        requests.append(TraceRequest(number, arrival_s, num_input, rng.randint(1, 120), blocks, block_tokens))
    return requests


def run_seed(seed: int, rates: FaultRates | None = None, *, check_each: bool = True) -> CheckedRun:
    """Runs one deployment. The same seed gives the same run."""
    rng = random.Random(seed)
    fleet = SimulatedFleet(random_spec(rng), seed)
    for request in random_requests(rng):
        fleet.submit(request)
    faults = schedule_faults(fleet, rng, _FAULTS_UNTIL_S, rates or FaultRates())
    scaling = ScalingModel(fleet, _EAGER_SCALING, _BOUNDS, _FAULTS_UNTIL_S) if rng.random() < _SCALED_SHARE else None
    problems: list[str] = []
    try:
        fleet.run(on_event=(lambda: invariants.after_event(fleet)) if check_each else None)
        settled_s = max(fleet.sim.now_s, _FAULTS_UNTIL_S) + invariants.SETTLE_S
        fleet.sim.run(until_s=settled_s)
        problems = invariants.at_the_end(fleet)
    except AssertionError as error:
        problems = [f"at {fleet.sim.now_s:.6f} s: {error!r}"]
    complete = sum(outcome.is_complete for outcome in fleet.outcomes)
    num_flips = scaling.num_flips if scaling is not None else 0
    num_resizes = scaling.num_resizes if scaling is not None else 0
    return CheckedRun(
        seed,
        faults,
        problems,
        len(fleet.outcomes),
        complete,
        fleet.sim.num_events,
        num_flips,
        num_resizes,
        fleet.num_migrated,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.check", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print the faults of each seed that fails")
    args = parser.parse_args(argv)
    runs = []
    for seed in range(args.first, args.first + args.seeds):
        run = run_seed(seed)
        runs.append(run)
        if run.problems:
            print(f"seed {seed}: " + "; ".join(run.problems[:4]), flush=True)
            if args.verbose:
                print("  " + "\n  ".join(run.faults))
    num_requests, num_complete = sum(run.num_requests for run in runs), sum(run.num_complete for run in runs)
    failed = sum(bool(run.problems) for run in runs)
    print(
        f"{len(runs)} seeds, {sum(len(run.faults) for run in runs)} faults, {num_requests} requests of which "
        f"{num_complete} completed, {sum(run.num_events for run in runs)} events, "
        f"{sum(run.num_flips for run in runs)} flips and {sum(run.num_resizes for run in runs)} changes of size by the "
        f"autoscaler, {sum(run.num_migrated for run in runs)} migrations; {failed} seeds broke an invariant"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
