"""Compares predicted with measured figures: `python -m benchmarks.validation [--shape disaggregated] [--seconds 15]`.

Starts a deployment of the bundled model, fits costs to calibration traffic, and runs five workloads, a stalled link and
a kill on real processes and in virtual time. Each shape takes about two minutes; results of a shape replace its earlier
ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.report import RESULTS, hardware, percentile, today, versions, write_result
from benchmarks.validation import measured, predicted
from benchmarks.validation.measured import Latencies, RealSystem, real_system
from benchmarks.validation.workloads import WORKLOADS, make_calibration, make_workload, sequential
from penstock.sizing.model_shape import find_shape
from simulator.costs.cost_file import CostProfile, write_costs
from simulator.fleet import FleetSpec, SimulatedFleet

_MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
_SHAPES = {"disaggregated": (1, 1), "colocated": (0, 1)}
_STALL_S = 1.0
# figure -> (share of the distribution, largest relative error)
_BOUNDS = {"TTFT p50": 0.15, "TTFT p99": 0.3, "ITL p50": 0.15, "ITL p99": 0.3, "tokens/s": 0.15}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("--shape", choices=_SHAPES, action="append", help="may be repeated; default: all")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="may be repeated; default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each workload")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    for shape in args.shape or _SHAPES:
        rows += asyncio.run(_validate(shape, args))
        publish(rows, args.results)
    return 0


async def _validate(shape: str, args: argparse.Namespace) -> list[dict[str, object]]:
    num_prefill, num_decode = _SHAPES[shape]
    rows: list[dict[str, object]] = []
    with real_system(_MODEL, num_prefill, num_decode) as system:
        profile = await _calibrate(system, shape, min(20.0, args.seconds))
        args.results.mkdir(exist_ok=True)
        write_costs(profile, args.results / f"costs-{shape}.json")
        spec = system.spec.with_costs(profile)
        for number, name in enumerate(args.workload or WORKLOADS):
            requests = make_workload(name, args.seconds, number)
            seen = await measured.measure(system, requests, f"{shape} {name}")
            rows += compare(shape, name, seen, predicted.predict(spec, requests))
        if not args.no_faults and num_prefill:
            rows += await _stall(system, spec, shape, args.seconds)
    if not args.no_faults and num_prefill:
        rows += await _kill(shape, profile, args.seconds)
    return rows


async def _calibrate(system: RealSystem, shape: str, seconds: float) -> CostProfile:
    """Fits costs to traffic that no workload repeats. The first requests only warm up."""
    await measured.measure(system, sequential(6, 90), f"{shape} warm-up")
    alone = sequential(12, 91)
    seen = await measured.measure(system, alone, f"{shape} alone")
    async with measured.recording(system) as recorder:
        await measured.measure(system, make_calibration(seconds, 92), f"{shape} calibration")
    token_bytes = int(find_shape(str(_MODEL)).kv_token_bytes)
    return predicted.fit_profile(system.spec, recorder.records, token_bytes, (alone, seen), shape)


async def _stall(system: RealSystem, spec: FleetSpec, shape: str, seconds: float) -> list[dict[str, object]]:
    """Stops the prefill worker for a second, so that its link to the decode worker carries nothing."""
    requests, at_s = make_workload("long prompts", seconds, 7), seconds / 2
    loop = asyncio.get_running_loop()

    def act() -> None:
        measured.freeze(system, "prefill-0")
        loop.call_later(_STALL_S, measured.thaw, system, "prefill-0")

    def schedule(fleet: SimulatedFleet) -> None:
        node = fleet.workers["prefill-0"].node
        fleet.sim.at(at_s + 1.0, lambda: fleet.network.freeze(node))
        fleet.sim.at(at_s + 1.0 + _STALL_S, lambda: fleet.network.thaw(node))

    return await _with_fault(system, spec, shape, "stalled link", requests, (at_s, act), schedule)


async def _kill(shape: str, profile: CostProfile, seconds: float) -> list[dict[str, object]]:
    """Kills one of two decode workers; its streams continue at the other."""
    requests, at_s = make_workload("steady short", seconds, 8), seconds / 2
    with real_system(_MODEL, 1, 2) as system:
        await measured.measure(system, sequential(6, 93), f"{shape} warm-up")

        def schedule(fleet: SimulatedFleet) -> None:
            fleet.sim.at(at_s + 1.0, lambda: fleet.kill("decode-1"))

        fault = (at_s, system.workers["decode-1"].popen.kill)
        return await _with_fault(system, system.spec.with_costs(profile), shape, "kill", requests, fault, schedule)


async def _with_fault(
    system: RealSystem,
    spec: FleetSpec,
    shape: str,
    name: str,
    requests: Sequence[measured.TraceRequest],
    fault: tuple[float, Callable[[], None]],
    schedule: Callable[[SimulatedFleet], None],
) -> list[dict[str, object]]:
    seen = await measured.measure(system, requests, f"{shape} {name}", fault)
    return compare(shape, name, seen, predicted.predict(spec, requests, schedule))


def figures(found: Latencies) -> dict[str, float]:
    """Returns the figures that are compared, in milliseconds and tokens a second."""
    return {
        "TTFT p50": percentile(found.ttft_s, 0.5) * 1e3,
        "TTFT p99": percentile(found.ttft_s, 0.99) * 1e3,
        "ITL p50": percentile(found.itl_s, 0.5) * 1e3,
        "ITL p99": percentile(found.itl_s, 0.99) * 1e3,
        "tokens/s": found.tokens_per_s,
    }


def compare(shape: str, workload: str, seen: Latencies, expected: Latencies) -> list[dict[str, object]]:
    """Returns a row for each figure, and prints it."""
    rows: list[dict[str, object]] = []
    wanted = figures(expected)
    for figure, value in figures(seen).items():
        error = wanted[figure] / value - 1 if value else math.inf
        row = {
            "shape": shape,
            "workload": workload,
            "figure": figure,
            "measured": value,
            "predicted": wanted[figure],
            "error": error,
            "bound": _BOUNDS[figure],
            "num_requests": len(seen.ttft_s),
            "num_failed": seen.num_failed,
            "num_failed_predicted": expected.num_failed,
        }
        rows.append(row)
        mark = "" if abs(error) <= _BOUNDS[figure] else "  beyond the bound"
        print(f"{shape:14} {workload:16} {figure:9} {value:9.2f} {wanted[figure]:9.2f} {error:+7.1%}{mark}", flush=True)
    return rows


def publish(rows: list[dict[str, object]], folder: Path) -> None:
    """Writes the rows together with other shapes' rows of earlier runs, and the chart of all."""
    file = folder / "validation.json"
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    new_shapes = {row["shape"] for row in rows}
    rows = [row for row in kept if row["shape"] not in new_shapes] + rows
    within = sum(abs(float(str(row["error"]))) <= float(str(row["bound"])) for row in rows)
    result = {"name": "validation", "date": today(), "hardware": hardware(), "versions": versions()}
    write_result(result | {"num_within": within, "rows": rows}, folder)
    print(f"{within} of {len(rows)} figures within their bounds")


if __name__ == "__main__":
    raise SystemExit(main())
