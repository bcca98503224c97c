"""The autoscaler beside one that goes by queue lengths, on traces in virtual time.  `make bench-autoscale`

Workers take 10, 60 or 200 s to start. The queue-length policy runs with each of several targets, since whoever uses
one tunes it; shown are all of them, and ours over the one that misses least. Traces come from the folder in
PENSTOCK_TRACES; without it the generated mix alone, whose rate swings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.report import RESULTS, versions
from cluster.autoscaler import Autoscaler
from cluster.scaling_signals import Bounds
from penstock.autoscaler_config import AutoscalerConfig, SloConfig
from penstock.config import DecodeConfig
from penstock.errors import InvalidInput
from penstock.types import Role
from simulator.costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.elastic import ElasticFleet, Planned, Scaler, is_good
from simulator.fleet import FleetSpec
from simulator.reactive import QueueTargets, Reactive
from simulator.report import percentile
from simulator.request import TraceRequest
from simulator.traces import SharedPrefixMix, drop_longer, load_trace, scale_arrivals, vary_rate

STARTS_S = (10.0, 60.0, 200.0)
SLO = SloConfig(ttft_s=5.0, ttft_token_s=0.002, itl_s=0.1)
BOUNDS = {role: Bounds(1, 24) for role in Role}
_TARGETS = [QueueTargets(prefill, decode) for prefill in (1.0, 2.0) for decode in (12.0, 32.0)]
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


@dataclass(frozen=True, slots=True)
class Result:
    policy: str
    num_requests: int
    num_missed: int
    worker_hours: float
    num_changes: int
    ttft_p99_s: float
    tpot_p99_s: float
    good_per_worker_hour: float


def run(name: str, requests: Sequence[TraceRequest], start_s: float, scaler: Scaler, spec: FleetSpec = SPEC) -> Result:
    fleet = ElasticFleet(spec, 0, scaler, SLO, start_s)
    outcomes = fleet.run(requests)
    num_good = sum(is_good(one, SLO) for one in outcomes)
    hours = fleet.worker_s / 3600
    return Result(
        name,
        len(outcomes),
        len(outcomes) - num_good,
        hours,
        fleet.num_changes,
        percentile([one.ttft_s for one in outcomes if one.ttft_s is not None], 0.99),
        percentile([one.tpot_s for one in outcomes], 0.99),
        num_good / hours,
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


def compare(trace: str, requests: Sequence[TraceRequest], start_s: float) -> dict[str, object]:
    policies: dict[str, Scaler] = {"planned": planned(start_s)}
    for one in _TARGETS:
        policies[f"queues, {one.prefill:g} and {one.decode:g} a worker"] = Reactive(one, BOUNDS)
    results = []
    for name, scaler in policies.items():
        results.append(run(name, requests, start_s, scaler))
        print("  " + _line(results[-1]), flush=True)
    ours, *others = results
    best = min(others, key=lambda one: one.num_missed)
    ratios = {
        "missed": ours.num_missed / max(1, best.num_missed),
        "worker_hours": ours.worker_hours / best.worker_hours,
        "changes": ours.num_changes / max(1, best.num_changes),
    }
    print(
        f"  ours over {best.policy}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), flush=True
    )
    rows = [asdict(one) for one in (ours, *others)]
    return {"trace": trace, "start_s": start_s, "best": best.policy, "ratios": ratios, "rows": rows}


def _line(one: Result) -> str:
    return (
        f"{one.policy:30} missed {one.num_missed:5} ({one.num_missed / one.num_requests:6.2%})  "
        f"{one.worker_hours:6.2f} worker hours  {one.num_changes:3} changes  TTFT p99 {one.ttft_p99_s:6.1f} s  "
        f"{one.good_per_worker_hour:5.0f} good a worker hour"
    )


def _publish(cases: Sequence[dict[str, object]]) -> None:
    """In the place of what earlier runs found of the same cases."""
    path = RESULTS / "autoscale.json"
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    new = {(one["trace"], one["start_s"]) for one in cases}
    kept = [one for one in known if (one["trace"], one["start_s"]) not in new]
    RESULTS.mkdir(exist_ok=True)
    result = {"name": "autoscale", "versions": versions(), "slo": SLO.model_dump(), "cases": [*kept, *cases]}
    path.write_text(json.dumps(result, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale", description=__doc__)
    parser.add_argument("--trace", choices=list(TRACES), action="append", help="may be repeated; default: all")
    parser.add_argument("--start", type=float, action="append", help="seconds; may be repeated; default: 10, 60, 200")
    args = parser.parse_args(argv)
    for trace in args.trace or TRACES:
        try:
            requests = TRACES[trace]()
        except InvalidInput as error:
            print(f"left out: {error}")
            continue
        for start_s in args.start or STARTS_S:
            print(f"\n{trace}: {len(requests)} requests, {requests[-1].arrival_s:.0f} s, start-up {start_s:g} s")
            _publish([compare(trace, requests, start_s)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
