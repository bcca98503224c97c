"""Predicts what clients see by running the same requests in virtual time, with costs fitted to a separate run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles

import numpy as np

from benchmarks.validation.runs import (
    CALIBRATIONS,
    LONG_REFERENCE,
    MODEL,
    NUM_PAGES,
    REFERENCE,
    Fault,
    Latencies,
    Measurement,
    PlannedRun,
    deployments,
    pool,
)
from engine.memory.estimates import saturating_tokens
from penstock.config import DecodeConfig, EngineConfig, PrefillConfig
from penstock.sizing.model_shape import find_shape
from penstock.types import Role
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.fit import fit_steps, least_squares
from simulator.costs.machine import FrontThread, SharedCores, StepKind
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

    def measure(self, run: PlannedRun) -> Latencies:
        """Serves a run in virtual time. Prompts of different runs differ."""
        fleet, start_s = self._fleet, self._fleet.sim.now_s
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


def predict_round(seen: Measurement, costs: CostProfile) -> dict[str, Latencies]:
    """Returns what the costs predict for every run of a round."""
    expected: dict[str, Latencies] = {}
    for sizes, runs in deployments(seen.shape, seen.seconds, seen.round):
        system = PredictedSystem(fleet_spec(*sizes).with_costs(costs))
        expected |= {run.name: system.measure(run) for run in runs}
    return expected


def fit_costs(rounds: Sequence[Measurement]) -> CostProfile:
    """Fits costs to the calibrations of all rounds, at the usual speed of the machine, and to requests that were alone.

    The usual speed is that of all requests that were alone, which were measured throughout each round. The time between
    steps, and that of requests outside of workers, is what their latencies have beyond their own steps and messages.
    """
    usual_s = _alone_s([record for seen in rounds for name in _references(seen) for record in seen.records[name]])
    runs = [(seen, name) for seen in rounds for name in CALIBRATIONS if not seen.runs[name].is_disturbed]
    runs = runs or [(seen, name) for seen in rounds for name in CALIBRATIONS]
    records = [record for seen, name in runs for record in _at_usual_speed(seen, name, usual_s)]
    latency_s = _latency_s([hop_s for seen, name in runs for hop_s in seen.runs[name].hops_s])
    alone = pool([seen.runs[name] for seen in rounds for name in _references(seen)])
    shape, cores = rounds[0].shape, _shared_cores(rounds)
    between_s = max(0.0, median(alone.itl_s) - usual_s[StepKind.DECODE])
    first_s = usual_s[StepKind.CHUNK] + 2 * latency_s  # the calls go to the decode worker and back
    front_s = max(0.0, median(alone.ttft_s) - first_s)
    fitted = fit_steps(records, cores)
    token_bytes = int(find_shape(str(MODEL)).kv_token_bytes)
    return CostProfile(
        shape,
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
    """Returns the names of the runs of short requests that were alone, without disturbed ones if possible."""
    names = [name for name in seen.runs if name.startswith(REFERENCE)]
    return [name for name in names if not seen.runs[name].is_disturbed] or names


def _at_usual_speed(seen: Measurement, name: str, usual_s: Mapping[StepKind, float]) -> list[StepRecord]:
    """Returns the records of a run as they would be if the requests alone before and after it had had usual steps."""
    names = list(seen.runs)
    place = names.index(name)
    near = [each for each in names[max(0, place - 1) : place + 2] if each in _references(seen)]
    near_s = _alone_s([record for each in near for record in seen.records[each]])
    slowness = {kind: near_s[kind] / usual_s[kind] for kind in usual_s}
    slowness[StepKind.PREFILL] = slowness[StepKind.CHUNK]
    return [
        replace(record, totals=replace(record.totals, seconds=record.totals.seconds / slowness[record.kind]))
        for record in seen.records[name]
    ]


def _alone_s(records: Sequence[StepRecord]) -> dict[StepKind, float]:
    """Returns the median times of steps by kind. Decode workers compute the prompts of requests that are alone."""
    return {
        kind: median(record.totals.seconds / record.totals.steps for record in records if record.kind is kind)
        for kind in (StepKind.DECODE, StepKind.CHUNK)
    }


def _shared_cores(rounds: Sequence[Measurement]) -> SharedCores:
    """Returns how many threads and how much processor time steps, requests and messages need.

    Worker threads come from requests that are alone: for decode steps from the processor time of each later token over
    the time between two, for prompts from what long ones need beyond short ones until the first token.
    """
    short = pool([seen.runs[name] for seen in rounds for name in _references(seen)])
    long = pool([seen.runs[LONG_REFERENCE] for seen in rounds])
    extra_s = median(long.ttft_s) - median(short.ttft_s)
    extra_cpu_s = _worker_cpu_s(long.first_cpu_s) - _worker_cpu_s(short.first_cpu_s)
    router, client = (_front_thread(rounds, short, name) for name in ("router", "client"))
    return SharedCores(
        rounds[0].machine["hardware"]["cores"],
        decode_threads=_worker_cpu_s(short.later_cpu_s) / median(short.itl_s),
        prompt_threads=extra_cpu_s / extra_s,
        router=router,
        client=client,
    )


def _worker_cpu_s(found: Sequence[Mapping[str, float]]) -> float:
    """Returns the median of the processor time of all workers together."""
    return median(sum(cpu_s for name, cpu_s in one.items() if name not in ("client", "router")) for one in found)


def _front_thread(rounds: Sequence[Measurement], alone: Latencies, process: str) -> FrontThread:
    """Returns what the router or the client needs.

    Requests that are alone show what a request and a message with one token need; the calibrations, what further tokens
    of a message do.
    """
    message_s = median(one[process] for one in alone.later_cpu_s)
    request_s = max(0.0, median(one[process] for one in alone.first_cpu_s) - message_s)
    further, further_s = [], []
    for seen in rounds:
        for name in CALIBRATIONS:
            steps = [(each.has_prompts, each.totals) for each in seen.records[name] if each.role is Role.DECODE]
            further.append(sum(each.tokens - each.steps for has_prompts, each in steps if not has_prompts))
            num_messages = sum(each.steps for _, each in steps)
            run = seen.runs[name]
            further_s.append(run.cpu_s[process] - request_s * len(run.ttft_s) - message_s * num_messages)
    token_s, *_ = least_squares(np.array(further, float)[:, None], np.array(further_s))
    token_s = min(float(token_s), message_s)
    return FrontThread(request_s, message_s - token_s, token_s)


def _latency_s(hops_s: Sequence[float]) -> float:
    """Returns the time of a message between two processes.

    The slower of the calls to a prefill worker and back also wait for a step of the decode worker.
    """
    return max(0.0, quantiles(hops_s, n=4)[0] / 2) if len(hops_s) > 1 else LinkCosts().latency_s
