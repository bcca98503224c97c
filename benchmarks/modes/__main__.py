"""Measures two colocated workers, a prefill and a decode worker, and vLLM if it is named, with the same requests.

Each worker has one core of two; router and load generator share them. First the colocated mode is calibrated: its
latencies with one request at a time, from which the SLOs follow (3, 5 and 10 times as long), and the requests a second
of a closed loop, of which the loads are shares. Decode workers get the middle SLO's time per token
(`decode.itl_target_s`). Then each mode gets the same Poisson arrivals at each load.

A whole sweep takes most of an hour on two cores. `--workload`, `--mode` and `--loads` name a part of it; earlier
measurements stay in `build/modes` and appear in the tables. `--rounds` measures everything again and pools the
requests. `--page-only` measures nothing and writes the tables of earlier measurements. `--quick` only shows that every
mode runs.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.process_group import ROOT
from benchmarks.common.report import RESULTS, hardware, publish
from benchmarks.common.shapes import random_llama
from benchmarks.common.vllm_process import Vllm, parse_with_vllm
from benchmarks.modes.deployments import COLOCATED, modes
from benchmarks.modes.report import MODES, rows_of, write_docs, write_page
from benchmarks.modes.study import Calibration, WorkloadStudy
from benchmarks.modes.traffic import workloads
from benchmarks.serving.rounds import latency, measure_http
from engine.models.config import ModelConfig
from penstock.bench.measure import SweepSpec, make_result
from penstock.bench.results.result_file import make_point
from penstock.bench.workloads.plan import Source
from penstock.bench.workloads.schedule import Arrivals

BUILD = ROOT / "build" / "modes"
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0)  # shares of the capacity of two colocated workers
_QUICK_REQUESTS, _QUICK_LOAD = 4, 0.7
_IDLE_REQUESTS, _CAPACITY_REQUESTS, _CAPACITY_CLIENTS = 8, 32, 16


def calibrate(address: str, source: Source, vocab_size: int, seed: int) -> Calibration:
    """Measures the latencies of one request at a time, and the capacity of a closed loop.

    Takes the seed and the next one: other calibrations of the deployment need seeds of their own.
    """
    few = Source(source.name, source.drafts[:_IDLE_REQUESTS], source.gaps_are_pauses)
    many = Source(source.name, source.drafts[:_CAPACITY_REQUESTS], source.gaps_are_pauses)
    # Separate seeds: otherwise a mode would find prompts of the calibration in its cache.
    (idle,) = asyncio.run(measure_http(address, few, [Arrivals(concurrency=1)], vocab_size, seed=seed))
    (full,) = asyncio.run(
        measure_http(address, many, [Arrivals(concurrency=_CAPACITY_CLIENTS)], vocab_size, seed=seed + 1)
    )
    ttft, tpot = latency(idle.figures, "TTFT"), latency(idle.figures, "TPOT")
    return Calibration(ttft.p50_s, tpot.p50_s, full.figures.completed_per_s)


def measure_mode(
    study: WorkloadStudy, mode: str, address: str, source: Source, loads: Sequence[float], vocab_size: int
) -> None:
    """Measures a mode at every load and adds the results to the study."""
    assert study.calibration is not None
    points = [Arrivals(rate=float(f"{load * study.calibration.capacity:.3g}")) for load in loads]
    found = asyncio.run(measure_http(address, source, points, vocab_size))
    slos = study.calibration.slos()
    judged = [make_point(point.name, point.offered, point.run, slos) for point in found]
    spec = SweepSpec(source, points, slos)
    study.add(mode, make_result(spec, judged, target=mode, label=f"{study.name}, {mode}", settings={}))
    study.save()
    for point in judged:
        ttft, itl = latency(point.figures, "TTFT"), latency(point.figures, "ITL")
        print(
            f"  {study.name}, {mode}, {point.name}: TTFT {ttft.p50_s * 1e3:.0f} / {ttft.p99_s * 1e3:.0f}, "
            f"ITL {itl.p50_s * 1e3:.1f} / {itl.p99_s * 1e3:.1f} ms (p50 / p99), "
            f"goodput {' / '.join(f'{slo.goodput:.2f}' for slo in point.figures.slos)}/s",
            flush=True,
        )


def measure_all(studies: Sequence[WorkloadStudy], options: argparse.Namespace, vllm: Vllm | None) -> None:
    """Measures every workload in every mode, round after round."""
    sources = {study.name: workloads()[study.name](options.requests, options.seed) for study in studies}
    model = options.model or random_llama()
    vocab_size = ModelConfig.from_folder(str(model)).vocab_size
    if uncalibrated := [study for study in studies if study.calibration is None]:
        with modes(model, None, None)[COLOCATED] as address:
            for number, study in enumerate(uncalibrated):
                study.calibration = calibrate(address, sources[study.name], vocab_size, seed=1 + 2 * number)
                print(f"{study.name}: {study.calibration}", flush=True)
    for round_number in range(options.rounds):
        for study in studies:
            assert study.calibration is not None
            for mode, serving in modes(model, vllm, study.calibration.itl_target_s).items():
                if mode not in options.mode:
                    continue
                print(f"round {round_number + 1}: {study.name}, {mode}", flush=True)
                try:
                    with serving as address:
                        measure_mode(study, mode, address, sources[study.name], options.loads, vocab_size)
                except (RuntimeError, TimeoutError) as error:
                    if mode != MODES[-1]:
                        raise
                    print(f"skipped {mode}: {error!r}", flush=True)  # our figures are valid without it


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.modes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    known = list(workloads())
    add("--workload", nargs="+", choices=known, default=known, help="default: all")
    add("--mode", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the capacity; default: %(default)s")
    add("--model", type=Path, metavar="DIR", help="a checkpoint folder; default: random weights of the 135M shape")
    add("--requests", type=int, default=64, help="of each workload at each load; default: %(default)s")
    add("--rounds", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--quick", action="store_true", help="send 4 requests at one load in each mode, and write no result")
    add("--page-only", action="store_true", help="write the tables of what was measured before")
    add("--results", type=Path, default=RESULTS, help="folder of modes.json and modes.html")
    add("--no-docs", action="store_true", help="leave docs/modes.md as it is")
    options, vllm, peer = parse_with_vllm(parser)
    if options.quick:
        options.requests, options.loads = _QUICK_REQUESTS, [_QUICK_LOAD]
        with tempfile.TemporaryDirectory() as folder:
            measure_all([WorkloadStudy(name, Path(folder) / name) for name in options.workload], options, vllm)
        return
    if options.fresh:
        shutil.rmtree(BUILD, ignore_errors=True)
    started_s = time.perf_counter()
    if not options.page_only:
        measure_all([WorkloadStudy.load(name, BUILD, MODES) for name in options.workload], options, vllm)
    studies = [study for name in known if (study := WorkloadStudy.load(name, BUILD, MODES)).results]
    if not studies:
        parser.error("nothing was measured yet: leave out --page-only")
    points = [point for study in studies for result in study.results.values() for point in result.points]
    requests = max(point.figures.num_requests for point in points)
    model = options.model.name if options.model else "135M Llama shape, bf16"
    workload = f"{model}, up to {requests} requests at each load, a core for each worker; compared with {peer}"
    publish("modes", workload, rows_of(studies), options.results)
    write_page(studies, options.results / "modes.html")
    if not options.no_docs:
        write_docs(studies)
    print(f"took {time.perf_counter() - started_s:.0f} s on {hardware().get('cpu')}")


if __name__ == "__main__":
    main()
