"""Predicts what clients see by running the same requests in virtual time, with costs fitted to a separate run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.validation.measured import Latencies
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.fit import StepRecord, fit_steps
from simulator.costs.step_costs import LinkCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import TraceRequest

_SHARED_MEMORY_BYTES_PER_S = 3e9  # copies through shared memory on one core; of little weight for pages this small


def predict(
    spec: FleetSpec, requests: Sequence[TraceRequest], on_start: Callable[[SimulatedFleet], None] = lambda fleet: None
) -> Latencies:
    """Runs the requests in virtual time. `on_start` may schedule faults."""
    fleet = SimulatedFleet(spec, 0)
    fleet.sim.run(until_s=1.0)  # routers connect
    for request in requests:
        fleet.submit(replace(request, arrival_s=request.arrival_s + 1.0))
    on_start(fleet)
    fleet.run()
    found, token_s = Latencies(elapsed_s=fleet.sim.now_s - 1.0), spec.front.token_s
    for outcome in fleet.outcomes:
        if not outcome.is_complete or outcome.ttft_s is None:
            found.num_failed += 1
            continue
        found.ttft_s.append(outcome.ttft_s + token_s)
        found.num_tokens += outcome.num_tokens
        if outcome.num_tokens > 1:
            found.itl_s.append(outcome.tpot_s)
    return found


def fit_profile(
    spec: FleetSpec,
    records: Sequence[StepRecord],
    token_bytes: int,
    alone: tuple[Sequence[TraceRequest], Latencies],
    name: str,
) -> CostProfile:
    """Fits the costs of steps to records, and the costs outside of steps to requests that were `alone`."""
    fitted = fit_steps(records)
    link = LinkCosts(bytes_per_s=_SHARED_MEMORY_BYTES_PER_S, token_bytes=token_bytes)
    source = f"fitted to {len(records)} reports of steps"
    profile = CostProfile(name, source, fitted.prefill, fitted.decode, link, errors=fitted.errors)
    requests, seen = alone
    expected = predict(spec.with_costs(profile), requests)
    between_s = max(0.0, median(seen.itl_s) - median(expected.itl_s))  # time from one step to the next
    front_s = max(0.0, median(seen.ttft_s) - median(expected.ttft_s))
    return replace(
        profile,
        decode=replace(profile.decode, step_s=profile.decode.step_s + between_s),
        front=FrontCosts(request_s=front_s),
    )
