"""Predicts what clients see by running the same requests in virtual time, with costs fitted to a separate run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles

import numpy as np

from benchmarks.validation.runs import (
    CALIBRATIONS,
    DISTURBED,
    MODEL,
    NUM_PAGES,
    REFERENCE,
    SHAPES,
    Fault,
    Latencies,
    Measurement,
    PlannedRun,
    deployments,
    num_threads,
    pool,
)
from engine.memory.estimates import saturating_tokens
from penstock.config import DecodeConfig, EngineConfig, PrefillConfig
from penstock.sizing.model_shape import find_shape
from penstock.types import Role
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.fit import fit_steps, least_squares
from simulator.costs.machine import SharedCores, StepKind
from simulator.costs.records import StepRecord
from simulator.costs.step_costs import LinkCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import TraceRequest

_SHARED_MEMORY_BYTES_PER_S = 3e9  # copies through shared memory on one core; of little weight for pages this small
_NUMBERS_A_RUN = 1_000_000  # more than a run has requests or blocks
_REST_S = 1.0  # pause between two runs


class PredictedSystem:
    """A simulated deployment. It keeps its caches and what it has learned from run to run, like the real one."""

    def __init__(self, spec: FleetSpec) -> None:
        self._token_s = spec.front.token_s
        self._fleet = SimulatedFleet(spec, 0)
        self._num_runs = 0
        self._rest()  # routers connect

    def measure(self, run: PlannedRun, drift: Mapping[StepKind, float] | None = None) -> Latencies:
        """Serves a run in virtual time on a machine as slow as `drift` says. Prompts of different runs differ."""
        fleet, start_s = self._fleet, self._fleet.sim.now_s
        fleet.machine.set_drift(drift or {})
        outcomes = [fleet.submit(self._shifted(request, start_s)) for request in run.requests]
        if run.fault is not None:
            self._break_later(run.fault, start_s)
        fleet.run()
        found = Latencies(elapsed_s=fleet.sim.now_s - start_s)
        for outcome in outcomes:
            if not outcome.is_complete or outcome.ttft_s is None:
                found.num_failed += 1
                continue
            found.ttft_s.append(outcome.ttft_s + self._token_s)
            found.num_tokens += outcome.num_tokens
            found.num_elsewhere += outcome.computed_by != outcome.decoded_by[0]
            if outcome.num_tokens > 1:
                found.itl_s.append(outcome.tpot_s)
        self._num_runs += 1
        self._rest()
        return found

    def _shifted(self, request: TraceRequest, start_s: float) -> TraceRequest:
        """Returns the request of this run: later, and with a number and blocks that no other run has."""
        first = self._num_runs * _NUMBERS_A_RUN
        blocks = tuple(first + block for block in request.block_ids)
        return replace(
            request,
            number=first + request.number,
            arrival_s=start_s + request.arrival_s,
            block_ids=blocks,
        )

    def _break_later(self, fault: Fault, start_s: float) -> None:
        fleet, at_s = self._fleet, start_s + fault.at_s
        if fault.stall_s is None:
            fleet.sim.at(at_s, lambda: fleet.kill(fault.worker))
            return
        node = fleet.workers[fault.worker].node
        fleet.sim.at(at_s, lambda: fleet.network.freeze(node))
        fleet.sim.at(at_s + fault.stall_s, lambda: fleet.network.thaw(node))

    def _rest(self) -> None:
        self._fleet.sim.run(until_s=self._fleet.sim.now_s + _REST_S)


def fleet_spec(num_prefill: int, num_decode: int) -> FleetSpec:
    """Describes a deployment of `measured.real_system`."""
    prefill = PrefillConfig()
    chunk_tokens = prefill.max_batch_tokens or saturating_tokens("cpu")
    return FleetSpec(
        num_prefill,
        num_decode,
        page_size=EngineConfig(model=str(MODEL)).page_size,
        prefill_pages=NUM_PAGES,
        decode_pages=NUM_PAGES,
        prefill=prefill.model_copy(update={"max_batch_tokens": chunk_tokens}),
        decode=DecodeConfig(),
    )


def predict_shape(seen: Measurement, profile: CostProfile, *, with_drift: bool = True) -> dict[str, Latencies]:
    """Returns what the costs predict for every run, at the speed of the machine then or at its usual speed."""
    expected: dict[str, Latencies] = {}
    for sizes, runs in deployments(seen.shape, seen.seconds, seen.round):
        system = PredictedSystem(fleet_spec(*sizes).with_costs(profile))
        for run in runs:
            expected[run.name] = system.measure(run, drift_during(seen, run.name) if with_drift else {})
    return expected


def fit_profile(seen: Measurement) -> CostProfile:
    """Fits the costs of steps and messages to the calibrations that other programs disturbed least, at the usual speed
    of the machine.

    The time between steps, and that of requests outside of workers, is what the latencies of requests that were alone
    have beyond their own steps and messages.
    """
    names = _calibrations(seen)
    records = [record for name in names for record in _undrifted(seen.records[name], drift_during(seen, name))]
    latency_s = _latency_s([hop_s for name in names for hop_s in seen.runs[name].hops_s])
    references = _references(seen)
    alone = pool([seen.runs[name] for name in references])
    steps = [record for name in references for record in seen.records[name]]
    cores = SharedCores(
        seen.machine["hardware"]["cores"], num_threads(sum(SHAPES[seen.shape])), _frame_s(seen, [*names, *references])
    )
    between_s = max(0.0, median(alone.itl_s) - _step_s(steps, has_prompts=False))
    first_s = _step_s(steps, has_prompts=True) + 2 * latency_s  # the calls go to the decode worker and back
    front_s = max(0.0, median(alone.ttft_s) - first_s - cores.frame_s)
    fitted = fit_steps(records, cores)
    token_bytes = int(find_shape(str(MODEL)).kv_token_bytes)
    return CostProfile(
        seen.shape,
        f"fitted to {len(records)} reports of steps",
        fitted.prefill,
        replace(fitted.decode, step_s=fitted.decode.step_s + between_s),
        LinkCosts(_SHARED_MEMORY_BYTES_PER_S, latency_s, token_bytes=token_bytes),
        FrontCosts(request_s=front_s),
        errors=fitted.errors,
        spread=fitted.spread,
        cores=cores,
    )


def _references(seen: Measurement) -> list[str]:
    """Returns the names of the runs of requests that were alone."""
    return [name for name in seen.runs if name.startswith(REFERENCE)]


def drift_during(seen: Measurement, name: str) -> dict[StepKind, float]:
    """Returns how slow the machine was during a run, relative to its usual speed, by kind of step.

    The steps of requests that are alone before and after the run show it, and those of all such runs the usual speed.
    """
    names = list(seen.runs)
    place = names.index(name)
    near = [each for each in names[max(0, place - 1) : place + 2] if each in _references(seen)]
    if not near:
        return {}
    drift: dict[StepKind, float] = {}
    for kind in (StepKind.DECODE, StepKind.CHUNK):
        has_prompts = kind is StepKind.CHUNK
        usual_s = _step_s([record for each in _references(seen) for record in seen.records[each]], has_prompts)
        drift[kind] = _step_s([record for each in near for record in seen.records[each]], has_prompts) / usual_s
    return drift | {StepKind.PREFILL: drift[StepKind.CHUNK]}


def _undrifted(records: Sequence[StepRecord], drift: Mapping[StepKind, float]) -> list[StepRecord]:
    """Returns the records as they would be at the usual speed of the machine."""
    return [
        replace(record, totals=replace(record.totals, seconds=record.totals.seconds / drift.get(record.kind, 1.0)))
        for record in records
    ]


def _calibrations(seen: Measurement) -> list[str]:
    """Returns the calibrations that other programs did not disturb, or the one that they disturbed least."""
    shares = {name: seen.runs[name].others_share or 0.0 for name in CALIBRATIONS}
    return [name for name, share in shares.items() if share <= max(DISTURBED, min(shares.values()))]


def _frame_s(seen: Measurement, names: Sequence[str]) -> float:
    """Returns the processor time of router and client for a message with tokens: what grows with the decode steps."""
    quantities, cpu_s = [], []
    for name in names:
        run = seen.runs[name]
        num_steps = sum(record.totals.steps for record in seen.records[name] if record.role is Role.DECODE)
        quantities.append((num_steps, len(run.ttft_s)))
        cpu_s.append(run.cpu_s["client"] + run.cpu_s["router"])
    frame_s, _ = least_squares(np.array(quantities, float), np.array(cpu_s))
    return float(frame_s)


def _step_s(records: Sequence[StepRecord], has_prompts: bool) -> float:
    """Returns the median time of a step."""
    totals = [record.totals for record in records if record.has_prompts is has_prompts]
    return median(each.seconds / each.steps for each in totals)


def _latency_s(hops_s: Sequence[float]) -> float:
    """Returns the time of a message between two processes.

    The slower of the calls to a prefill worker and back also wait for a step of the decode worker.
    """
    return max(0.0, quantiles(hops_s, n=4)[0] / 2) if len(hops_s) > 1 else LinkCosts().latency_s
