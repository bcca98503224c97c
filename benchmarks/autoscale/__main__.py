"""Compares the autoscaler with queue-length autoscaling on traces in virtual time (`make bench-autoscale`).

Workers take 10, 60 or 200 s to start. The queue-length policy runs with each of a grid of targets; three of these
settings are compared with ours (`benchmarks.autoscale.baselines`). A policy that knows the trace shows the best that
any policy could do. The first ten minutes, in which every policy sees the traffic for the first time, are reported
separately and do not count in the ratios. Traces come from the folder in PENSTOCK_TRACES; without it only the generated
mixes run, whose rates oscillate.

The autoscaler's rules and constants were tuned on the traces in `TUNED`. Those in `HELD_OUT` only judge it, beside the
queue-length settings that are best on the tuned traces.

Deployments are simulated coarsely. With `simulator.fleet`, which computes every page and token, nine policies on all
cases would take about 90 minutes on one core, ten times as long; `--detailed` runs ours and the chosen baselines
with it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Any

from benchmarks.autoscale.baselines import (
    AIMS,
    TARGETS,
    PolicyResult,
    QueueScaler,
    QueueTargets,
    choose,
    choose_one,
    judge,
    over_all,
    ratios,
)
from benchmarks.autoscale.coarse_fleet import CoarseFleet
from benchmarks.autoscale.elastic import (
    DetailedDeployment,
    ElasticDeployment,
    ElasticFleet,
    PolicyScaler,
    Scaler,
    is_good,
)
from benchmarks.autoscale.foresight import Foresight, offered, plan
from benchmarks.common.report import RESULTS, today, versions, write_result
from cluster.scaling.autoscaler_policy import AutoscalerPolicy
from cluster.scaling.signals import PoolBounds
from penstock.config import DecodeConfig
from penstock.config.autoscaler import AutoscalerConfig, SloConfig
from penstock.errors import InvalidInput
from penstock.types import Role
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.fleet import FleetSpec
from simulator.report import percentile
from simulator.request import TraceRequest
from simulator.traces import SharedPrefixMix, drop_longer, load_trace, scale_arrivals, vary_rate

STARTS_S = (10.0, 60.0, 200.0)
SLO = SloConfig(ttft_s=5.0, ttft_token_s=0.002, itl_s=0.1)
BOUNDS = {role: PoolBounds(1, 24) for role in Role}
WARM_S = 600.0
OURS, FORESIGHT = "ours", "foresight"
_LOADS = {  # the shares of a worker's capacity that policies with foresight try
    f"{FORESIGHT}, {prefill:g} and {decode:g}": {Role.PREFILL: prefill, Role.DECODE: decode}
    for prefill, decode in ((0.9, 0.75), (1.2, 0.75), (1.6, 0.7), (2.0, 0.7))
}
_FORESIGHT_CHANGES = 10  # most changes that it makes
_COMPUTE = PrefillCosts(step_s=0.03, token_s=560e-6, context_s=16e-9)
# Estimated for a 70B model on a pair of 80 GB GPUs: so slow that recorded traffic needs several workers.
SPEC = FleetSpec(
    num_prefill=4,
    num_decode=3,
    page_size=256,
    prefill_pages=1200,
    decode_pages=1200,
    prefill_costs=_COMPUTE,
    decode_costs=DecodeCosts(step_s=0.03, sequence_s=100e-6, kv_token_s=140e-9, chunk=_COMPUTE),
    link_costs=LinkCosts(token_bytes=327_680),
    decode=DecodeConfig(max_batch_sequences=128, max_batch_tokens=2048, max_local_tokens=32),
    report_interval_s=0.25,
)


def run(
    name: str,
    requests: Sequence[TraceRequest],
    start_s: float,
    scaler: Scaler,
    spec: FleetSpec = SPEC,
    make: Callable[[FleetSpec, int], ElasticDeployment] = DetailedDeployment,
    warm_s: float = 0.0,
) -> PolicyResult:
    """Runs one policy on one trace; requests that arrive before `warm_s` are counted as warm-up."""
    fleet = ElasticFleet(spec, 0, scaler, SLO, start_s, make, warm_s)
    outcomes = fleet.run(requests)
    missed = [each.request.arrival_s >= warm_s for each in outcomes if not is_good(each, SLO)]
    hours = (fleet.worker_s - fleet.warm_worker_s) / 3600
    counted = [each for each in outcomes if each.request.arrival_s >= warm_s]
    return PolicyResult(
        name,
        len(counted),
        sum(missed),
        hours,
        fleet.num_changes - fleet.warm_changes,
        percentile([each.ttft_s for each in counted if each.ttft_s is not None], 0.99),
        percentile([each.tpot_s for each in counted], 0.99),
        (len(counted) - sum(missed)) / hours,
        len(missed) - sum(missed),
        fleet.warm_worker_s / 3600,
        fleet.warm_changes,
    )


def autoscaler(start_s: float) -> PolicyScaler:
    """Returns the real autoscaler, which starts out with `start_s` as the start-up time of workers."""
    config = AutoscalerConfig(mode="on", slo=SLO, start_s=start_s)
    return PolicyScaler(AutoscalerPolicy(config, BOUNDS, SPEC.decode.max_batch_sequences))


def _swinging() -> list[TraceRequest]:
    mix = SharedPrefixMix(num_requests=6000, requests_per_s=2.5, num_systems=200, output_tokens=250)
    return vary_rate(mix.make(0), 1200.0, 0.7)


def _mooncake() -> list[TraceRequest]:
    kept = drop_longer(load_trace("mooncake_conversation_first3000.jsonl.gz"), 60_000)
    return scale_arrivals(kept, 0.25)


def _deep_swings() -> list[TraceRequest]:
    """A mix of slower and deeper swings, longer answers and fewer shared prefixes than the tuned one."""
    mix = SharedPrefixMix(
        num_requests=6000, requests_per_s=2.0, num_systems=50, turns=3, single_share=0.3, output_tokens=500
    )
    return vary_rate(mix.make(1), 1500.0, 0.9)


def _agents() -> list[TraceRequest]:
    return drop_longer(load_trace("agents_sessions_40.jsonl.gz"), 120_000)


Traces = dict[str, Callable[[], list[TraceRequest]]]
TUNED: Traces = {
    "generated mix, swinging": _swinging,
    "Azure conversation at 0.3 times its speed": lambda: scale_arrivals(
        load_trace("azure2023_conv_first5000.jsonl.gz"), 0.3
    ),
    "Mooncake conversation at a quarter of its speed": _mooncake,
    "Azure code as recorded": lambda: load_trace("azure2023_code_full.jsonl.gz"),
}
# The autoscaler's rules and constants must not be changed because of these; a trace that did so belongs above.
HELD_OUT: Traces = {
    "generated mix, deep swings": _deep_swings,
    "agents as recorded, up to 120,000 tokens": _agents,
    "reasoning at 0.2 times its speed": lambda: scale_arrivals(load_trace("servegen_reason_deepseekr1.jsonl.gz"), 0.2),
}
TRACES = TUNED | HELD_OUT


@cache
def _requests(trace: str) -> tuple[TraceRequest, ...]:
    return tuple(TRACES[trace]())


def _name_of(targets: QueueTargets) -> str:
    return f"queues, {targets.prefill:g} and {targets.decode:g} a worker"


_BASELINES = {_name_of(targets): targets for targets in TARGETS}
_POLICIES = [OURS, *_BASELINES, *_LOADS]


def run_case(case: tuple[str, float, str, bool]) -> PolicyResult:
    """Runs a case: trace, start-up seconds, policy, and whether every page and token is simulated."""
    trace, start_s, policy, detailed = case
    requests = _requests(trace)
    if policy == OURS:
        scaler: Scaler = autoscaler(start_s)
    elif policy in _BASELINES:
        scaler = QueueScaler(_BASELINES[policy], BOUNDS)
    else:
        sizes = plan(offered(requests, SPEC, SLO), SPEC, SLO, _LOADS[policy])
        scaler = Foresight(sizes, BOUNDS, start_s, _FORESIGHT_CHANGES)
    if detailed:
        return run(policy, requests, start_s, scaler, SPEC, DetailedDeployment, WARM_S)
    return run(policy, requests, start_s, scaler, make=CoarseFleet, warm_s=WARM_S)


def compare(
    trace: str, start_s: float, results: Sequence[PolicyResult], detailed: Sequence[PolicyResult]
) -> dict[str, Any]:
    """Prints the results of a trace with a start-up time and returns them as a case of the result file."""
    known = {result.policy: result for result in results}
    ours, baselines = known[OURS], [known[name] for name in _BASELINES]
    foresight = min(
        (each for each in results if each.policy.startswith(FORESIGHT)),
        key=lambda result: (result.num_missed, result.worker_hours),
    )
    chosen = choose(baselines, ours)
    floor = min(result.num_missed for result in results)
    compared = {rule: ratios(ours, result) for rule, result in chosen.items()}
    print(f"\n{trace}, start-up {start_s:g} s")
    for rule, result in ({"": ours} | chosen | {"knows the trace": foresight}).items():
        print(f"  {_line(result)}  {rule}")
    for rule, found in compared.items():
        met = judge(rule, found)
        words = ", ".join(
            f"{name} {ratio:.2f}{'' if met.get(name, True) else ' (not met)'}" for name, ratio in found.items()
        )
        avoidable = f"{ours.num_missed - floor} avoidable misses over {chosen[rule].num_missed - floor}"
        print(f"  ours over {rule}: {words}; {avoidable}")
    for result in detailed:
        print(f"  {_line(result)}  in detail", flush=True)
    return {
        "trace": trace,
        "split": "tuned" if trace in TUNED else "held out",
        "start_s": start_s,
        "baselines": {rule: result.policy for rule, result in chosen.items()},
        "ratios": compared,
        "met": {rule: judge(rule, found) for rule, found in compared.items()},
        "fewest_missed_by_anyone": floor,
        "avoidable_ratios": {
            rule: (ours.num_missed - floor) / max(1, result.num_missed - floor) for rule, result in chosen.items()
        },
        "foresight": foresight.policy,
        "foresight_ratios": {rule: ratios(foresight, result) for rule, result in chosen.items()},
        "rows": [asdict(result) for result in results],
        "detailed_rows": [asdict(result) for result in detailed],
    }


def _line(result: PolicyResult) -> str:
    return (
        f"{result.policy:30} missed {result.num_missed:4} of {result.num_requests} ({result.warm_missed:3} before)  "
        f"{result.worker_hours:6.2f} worker hours  {result.num_changes:3} changes  TTFT p99 {result.ttft_p99_s:6.1f} s"
    )


def judge_held_out(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compares the autoscaler on the held-out cases with the queue-length settings that suit the tuned ones best."""
    tuned, held_out = (
        [PolicyResult(**row) for case in cases if case["split"] == split for row in case["rows"]]
        for split in ("tuned", "held out")
    )
    settings = choose_one([row for row in tuned if row.policy == OURS or row.policy in _BASELINES], OURS)
    compared = over_all(held_out, OURS)
    return {
        rule: {"policy": policy, "ratios": compared[policy], "met": judge(rule, compared[policy])}
        for rule, policy in settings.items()
    }


def _print_over_all(cases: Sequence[dict[str, Any]]) -> None:
    """Prints the ratios of ours to each setting, the cheapest first, over all stored cases of each split."""
    for split in ("tuned", "held out"):
        rows = [PolicyResult(**row) for case in cases if case["split"] == split for row in case["rows"]]
        if not rows:
            continue
        print(f"\nours over one setting for all {split} traces and start-ups: missed, worker hours, changes")
        for name, ratio in sorted(over_all(rows, OURS).items(), key=lambda item: -item[1]["worker_hours"]):
            met = "  met" if all(ratio[figure] <= aim for figure, aim in AIMS.items()) else ""
            print(f"  {name:30} {ratio['missed']:5.2f} {ratio['worker_hours']:5.2f} {ratio['changes']:5.2f}{met}")


def _publish(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stores the cases in place of those that earlier runs stored for the same trace and start-up time. Returns all."""
    path = RESULTS / "autoscale.json"
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    new = {(case["trace"], case["start_s"]) for case in cases}
    kept = [case for case in known if case["trace"] in TRACES and (case["trace"], case["start_s"]) not in new]
    stored = sorted([*kept, *cases], key=lambda case: (list(TRACES).index(case["trace"]), case["start_s"]))
    result = {
        "name": "autoscale",
        "date": today(),
        "versions": versions(),
        "slo": SLO.model_dump(),
        "aims": AIMS,
        "warm_s": WARM_S,
        "held_out": judge_held_out(stored) if {case["split"] for case in stored} == {"tuned", "held out"} else None,
        "cases": stored,
    }
    write_result(result, indent=1)
    return stored


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale", description=__doc__)
    parser.add_argument("--trace", choices=list(TRACES), action="append", help="may be repeated; default: all")
    parser.add_argument("--start", type=float, action="append", help="seconds; may be repeated; default: 10, 60, 200")
    parser.add_argument(
        "--detailed", action="store_true", help="repeat ours and the chosen baselines with every page and token"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    args = parser.parse_args(argv)
    cases = []
    for trace in args.trace or TRACES:
        try:
            requests = _requests(trace)
        except InvalidInput as error:
            print(f"skipped: {error}")
            continue
        print(f"{trace}: {len(requests)} requests, {requests[-1].arrival_s:.0f} s")
        cases += [(trace, start_s) for start_s in args.start or STARTS_S]
    with ProcessPoolExecutor(args.processes) as pool:
        for trace, start_s in cases:
            results = list(pool.map(run_case, [(trace, start_s, policy, False) for policy in _POLICIES]))
            again: list[PolicyResult] = []
            if args.detailed:
                names = {
                    OURS,
                    *(result.policy for result in choose(results[1 : len(_BASELINES) + 1], results[0]).values()),
                }
                again = list(
                    pool.map(run_case, [(trace, start_s, policy, True) for policy in _POLICIES if policy in names])
                )
            stored = _publish([compare(trace, start_s, results, again)])
    if cases:
        _print_over_all(stored)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
