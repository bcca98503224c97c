"""The autoscaler beside one that goes by queue lengths, on traces in virtual time.  `make bench-autoscale`

Workers take 10, 60 or 200 s to start. The queue-length policy runs with each of a grid of targets, and three of these
settings are held against ours (`benchmarks.autoscale_rivals`). A policy that knows the trace says what could be met at
all. The first ten minutes, in which everybody sees the traffic for the first time, are told apart and are not counted
in the ratios. Deployments are simulated coarsely; `--detailed` runs what was chosen with every page and token, too.
Traces come from the folder in PENSTOCK_TRACES; without it the generated mix alone, whose rate swings.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import cache

from benchmarks.autoscale_rivals import AIMS, TARGETS, Result, choose, judge, over_all, ratios
from benchmarks.report import RESULTS, versions
from cluster.autoscaler import Autoscaler
from cluster.scaling_signals import Bounds
from penstock.autoscaler_config import AutoscalerConfig, SloConfig
from penstock.config import DecodeConfig
from penstock.errors import InvalidInput
from penstock.types import Role
from simulator.coarse import CoarseFleet
from simulator.costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.elastic import Deployment, Detailed, ElasticFleet, Planned, Scaler, is_good
from simulator.fleet import FleetSpec
from simulator.foresight import Foresight, offered, plan
from simulator.reactive import QueueTargets, Reactive
from simulator.report import percentile
from simulator.request import TraceRequest
from simulator.traces import SharedPrefixMix, drop_longer, load_trace, scale_arrivals, vary_rate

STARTS_S = (10.0, 60.0, 200.0)
SLO = SloConfig(ttft_s=5.0, ttft_token_s=0.002, itl_s=0.1)
BOUNDS = {role: Bounds(1, 24) for role in Role}
WARM_S = 600.0
OURS, FORESIGHT = "ours", "foresight"
_LOADS = {  # shares of a worker's capacity that policies with foresight plan with
    f"{FORESIGHT}, {prefill:g} and {decode:g}": {Role.PREFILL: prefill, Role.DECODE: decode}
    for prefill, decode in ((0.9, 0.75), (1.2, 0.75), (1.6, 0.7), (2.0, 0.7))
}
_CHANGES = 10  # that it may make, at most
_COMPUTE = PrefillCosts(step_s=0.03, token_s=560e-6, context_s=16e-9)
# A 70B model on a pair of 80 GB GPUs, reckoned: so few tokens a second that recorded traffic needs several workers.
SPEC = FleetSpec(
    num_prefill=4,
    num_decode=3,
    page_size=256,
    prefill_pages=1200,
    decode_pages=1200,
    prefill_costs=_COMPUTE,
    decode_costs=DecodeCosts(step_s=0.03, sequence_s=100e-6, kv_token_s=140e-9, chunk=_COMPUTE),
    link_costs=LinkCosts(token_bytes=327_680),
    decode=DecodeConfig(max_batch_sequences=128, max_batch_tokens=2048),
    decode_stride=4,
    report_interval_s=0.25,
)


def run(
    name: str,
    requests: Sequence[TraceRequest],
    start_s: float,
    scaler: Scaler,
    spec: FleetSpec = SPEC,
    make: Callable[[FleetSpec, int], Deployment] = Detailed,
    warm_s: float = 0.0,
) -> Result:
    """Counted from `warm_s` on."""
    fleet = ElasticFleet(spec, 0, scaler, SLO, start_s, make, warm_s)
    outcomes = fleet.run(requests)
    missed = [one.request.arrival_s >= warm_s for one in outcomes if not is_good(one, SLO)]
    hours = (fleet.worker_s - fleet.warm_worker_s) / 3600
    counted = [one for one in outcomes if one.request.arrival_s >= warm_s]
    return Result(
        name,
        len(counted),
        sum(missed),
        hours,
        fleet.num_changes - fleet.warm_changes,
        percentile([one.ttft_s for one in counted if one.ttft_s is not None], 0.99),
        percentile([one.tpot_s for one in counted], 0.99),
        (len(counted) - sum(missed)) / hours,
        len(missed) - sum(missed),
        fleet.warm_worker_s / 3600,
        fleet.warm_changes,
    )


def planned(start_s: float) -> Planned:
    config = AutoscalerConfig(mode="on", slo=SLO, start_s=start_s)
    return Planned(Autoscaler(config, BOUNDS, SPEC.decode.max_batch_sequences))


def _swinging() -> list[TraceRequest]:
    mix = SharedPrefixMix(num_requests=6000, requests_per_s=2.5, num_systems=200, output_tokens=250)
    return vary_rate(mix.make(0), 1200.0, 0.7)


def _mooncake() -> list[TraceRequest]:
    kept = drop_longer(load_trace("mooncake_conversation_first3000.jsonl.gz"), 60_000)
    return scale_arrivals(kept, 0.25)


TRACES: dict[str, Callable[[], list[TraceRequest]]] = {
    "generated mix, swinging": _swinging,
    "Azure conversation at 0.3 times its speed": lambda: scale_arrivals(
        load_trace("azure2023_conv_first5000.jsonl.gz"), 0.3
    ),
    "Mooncake conversation at a quarter of its speed": _mooncake,
    "Azure code as recorded": lambda: load_trace("azure2023_code_full.jsonl.gz"),
}


@cache
def _requests(trace: str) -> tuple[TraceRequest, ...]:
    return tuple(TRACES[trace]())


def _name_of(targets: QueueTargets) -> str:
    return f"queues, {targets.prefill:g} and {targets.decode:g} a worker"


_RIVALS = {_name_of(one): one for one in TARGETS}
_POLICIES = [OURS, *_RIVALS, *_LOADS]


def run_case(case: tuple[str, float, str, bool]) -> Result:
    """Of one policy, on one trace, with one start-up, in detail or not."""
    trace, start_s, policy, detailed = case
    requests = _requests(trace)
    if policy == OURS:
        scaler: Scaler = planned(start_s)
    elif policy in _RIVALS:
        scaler = Reactive(_RIVALS[policy], BOUNDS)
    else:
        sizes = plan(offered(requests, SPEC, SLO), SPEC, SLO, _LOADS[policy])
        scaler = Foresight(sizes, BOUNDS, start_s, _CHANGES)
    if detailed:  # several decode steps at once would make short answers late
        return run(policy, requests, start_s, scaler, replace(SPEC, decode_stride=1), Detailed, WARM_S)
    return run(policy, requests, start_s, scaler, make=CoarseFleet, warm_s=WARM_S)


def compare(trace: str, start_s: float, results: Sequence[Result], detailed: Sequence[Result]) -> dict[str, object]:
    known = {one.policy: one for one in results}
    ours, rivals = known[OURS], [known[name] for name in _RIVALS]
    foresight = min(
        (one for one in results if one.policy.startswith(FORESIGHT)), key=lambda one: (one.num_missed, one.worker_hours)
    )
    chosen = choose(rivals, ours)
    floor = min(one.num_missed for one in results)
    held = {rule: ratios(ours, one) for rule, one in chosen.items()}
    print(f"\n{trace}, start-up {start_s:g} s")
    for rule, one in ({"": ours} | chosen | {"knows the trace": foresight}).items():
        print(f"  {_line(one)}  {rule}")
    for rule, found in held.items():
        met = judge(rule, found)
        words = ", ".join(
            f"{name} {ratio:.2f}{'' if met.get(name, True) else ' (not met)'}" for name, ratio in found.items()
        )
        avoidable = f"{ours.num_missed - floor} avoidable misses over {chosen[rule].num_missed - floor}"
        print(f"  ours over {rule}: {words}; {avoidable}")
    for one in detailed:
        print(f"  {_line(one)}  in detail", flush=True)
    return {
        "trace": trace,
        "start_s": start_s,
        "rivals": {rule: one.policy for rule, one in chosen.items()},
        "ratios": held,
        "met": {rule: judge(rule, found) for rule, found in held.items()},
        "fewest_missed_by_anyone": floor,
        "avoidable_ratios": {
            rule: (ours.num_missed - floor) / max(1, one.num_missed - floor) for rule, one in chosen.items()
        },
        "foresight": foresight.policy,
        "foresight_ratios": {rule: ratios(foresight, one) for rule, one in chosen.items()},
        "rows": [asdict(one) for one in results],
        "detailed_rows": [asdict(one) for one in detailed],
    }


def _line(one: Result) -> str:
    return (
        f"{one.policy:30} missed {one.num_missed:4} of {one.num_requests} ({one.warm_missed:3} before)  "
        f"{one.worker_hours:6.2f} worker hours  {one.num_changes:3} changes  TTFT p99 {one.ttft_p99_s:6.1f} s"
    )


def _print_over_all() -> None:
    """Of the cases that are stored, earlier runs' included: ours over each setting, the cheapest first."""
    cases = json.loads((RESULTS / "autoscale.json").read_text())["cases"]
    print("\nours over one setting for all traces and start-ups: missed, worker hours, changes")
    found = over_all([Result(**row) for case in cases for row in case["rows"]], OURS)
    for name, of in sorted(found.items(), key=lambda item: -item[1]["worker_hours"]):
        met = "  met" if all(of[what] <= aim for what, aim in AIMS.items()) else ""
        print(f"  {name:30} {of['missed']:5.2f} {of['worker_hours']:5.2f} {of['changes']:5.2f}{met}")


def _publish(cases: Sequence[dict[str, object]]) -> None:
    """In the place of what earlier runs found of the same cases."""
    path = RESULTS / "autoscale.json"
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    new = {(one["trace"], one["start_s"]) for one in cases}
    kept = [one for one in known if (one["trace"], one["start_s"]) not in new]
    RESULTS.mkdir(exist_ok=True)
    result = {
        "name": "autoscale",
        "versions": versions(),
        "slo": SLO.model_dump(),
        "aims": AIMS,
        "warm_s": WARM_S,
        "cases": [*kept, *cases],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale", description=__doc__)
    parser.add_argument("--trace", choices=list(TRACES), action="append", help="may be repeated; default: all")
    parser.add_argument("--start", type=float, action="append", help="seconds; may be repeated; default: 10, 60, 200")
    parser.add_argument("--detailed", action="store_true", help="ours and what it is held against once more, in detail")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    args = parser.parse_args(argv)
    cases = []
    for trace in args.trace or TRACES:
        try:
            requests = _requests(trace)
        except InvalidInput as error:
            print(f"left out: {error}")
            continue
        print(f"{trace}: {len(requests)} requests, {requests[-1].arrival_s:.0f} s")
        cases += [(trace, start_s) for start_s in args.start or STARTS_S]
    with ProcessPoolExecutor(args.processes) as pool:
        for trace, start_s in cases:
            results = list(pool.map(run_case, [(trace, start_s, policy, False) for policy in _POLICIES]))
            again: list[Result] = []
            if args.detailed:
                names = {OURS, *(one.policy for one in choose(results[1 : len(_RIVALS) + 1], results[0]).values())}
                again = list(pool.map(run_case, [(trace, start_s, one, True) for one in _POLICIES if one in names]))
            _publish([compare(trace, start_s, results, again)])
    if cases:
        _print_over_all()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
