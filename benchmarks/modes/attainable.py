"""Finds the highest rate at which nine of ten requests meet the SLO in each mode, in virtual time.

This is goodput as DistServe defines it (docs/modes.md). The workers, workloads and SLOs are those of
`benchmarks.modes.virtual`. The load of each mode rises from one of `LOADS` to the next until too few of the counted
requests meet both limits, and the rate is interpolated linearly between that load and the one before. Some requests
cannot meet a tight SLO even alone; a second rate is the highest at which 90 % of the share that can do so meet it. A
queue beyond the capacity grows for as long as requests arrive, so more requests give lower rates there. Pairs of more
than two workers are also given other numbers of prefill workers. `--docs` writes the table of docs/modes.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.common.docs_tables import markdown_table, replace_between
from benchmarks.modes.report import DOCS
from benchmarks.modes.study import SLO_SCALES
from benchmarks.modes.virtual import (
    WARM_UP,
    IdleAndFull,
    LatencyLimits,
    ModelledWorkers,
    calibrate,
    core_of_135m,
    gpus,
    requests_of,
    simulate,
)

LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.6)
SHARE = 0.9
BEGIN, END = "<!-- tables of benchmarks.modes.attainable -->", "<!-- end of the tables of attainable rates -->"


@dataclass(frozen=True, slots=True)
class RateCase:
    """A mode of some workers with one SLO. `num_prefill` of the workers compute prompts for the others."""

    workload: str
    scale: float  # of the SLO, times idle
    mode: str
    num_prefill: int = 0


def highest_load(shares: Mapping[float, float], least: float) -> float | None:
    """Returns the load at which a share, linear between ascending loads, first falls below `least`.

    Returns None if the first one is below it, and the last load if none is.
    """
    before: tuple[float, float] | None = None
    for load, share in shares.items():
        if share < least:
            if before is None:
                return None
            return before[0] + (load - before[0]) * (before[1] - least) / (before[1] - share)
        before = load, share
    return before[0] if before else None


@dataclass(frozen=True, slots=True)
class RateGoal:
    """The share of requests that have to meet the SLO, beside the requests/s at a load of 1."""

    share: float
    capacity: float

    def load(self, shares: Mapping[float, float]) -> float:
        """Returns the highest load with that share, 0 if the first one misses it."""
        return highest_load(shares, self.share) or 0.0

    def rate(self, shares: Mapping[float, float]) -> str:
        load = highest_load(shares, self.share)
        if load is None:
            return "-"
        is_last = min(shares.values()) >= self.share
        return f"{'>= ' if is_last else ''}{load * self.capacity:.3g}"

    def ratio(self, shares: Mapping[float, float], others: Sequence[Mapping[float, float]]) -> str:
        best = max(map(self.load, others))
        return f"{self.load(shares) / best:.2f}" if best else "-"


def deployments_of(workers: ModelledWorkers, workloads: Sequence[str], scales: Sequence[float]) -> Iterator[RateCase]:
    """Yields all that is measured: the three modes, and pairs with other numbers of prefill workers."""
    half = workers.num_workers // 2
    others = range(max(1, half - 1), min(workers.num_workers - 1, half + 2) + 1)
    for workload in workloads:
        for scale in scales:
            yield RateCase(workload, scale, "colocated")
            for num_prefill in others:
                yield RateCase(workload, scale, "remote", num_prefill)
            yield RateCase(workload, scale, "auto", half)


def slo_of(calibrations: Mapping[str, IdleAndFull], workload: str, scale: float) -> LatencyLimits:
    idle = calibrations[workload].idle
    return LatencyLimits(scale * idle.ttft_s, scale * idle.tpot_s)


def share_alone(workers: ModelledWorkers, calibrations: Mapping[str, IdleAndFull], case: tuple[str, float]) -> float:
    """Returns the share of requests that meet the SLO if each is alone at colocated workers."""
    slo = slo_of(calibrations, *case)
    alone = requests_of(workers, case[0], 200, 0.0, seed=0)
    apart = (replace(request, arrival_s=100.0 * (1 + request.number)) for request in alone)
    point = simulate(workers.spec("colocated", slo), apart, 0, slo)
    return point.num_met / len(point.ttft_s)


def attain(
    workers: ModelledWorkers,
    calibrations: Mapping[str, IdleAndFull],
    alone: Mapping[tuple[str, float], float],
    count: int,
    seeds: int,
    deployed: RateCase,
) -> dict[float, float]:
    """Returns the shares of a deployment at rising loads, up to the first that misses both goals."""
    found = calibrations[deployed.workload]
    slo = slo_of(calibrations, deployed.workload, deployed.scale)
    workers = replace(workers, num_prefill=deployed.num_prefill)
    shares: dict[float, float] = {}
    for load in LOADS:
        num_met = num_counted = 0
        for seed in range(seeds):
            requests = requests_of(workers, deployed.workload, count, load * found.capacity, seed)
            point = simulate(workers.spec(deployed.mode, slo), requests, seed, slo, WARM_UP)
            num_met, num_counted = num_met + point.num_met, num_counted + len(point.ttft_s)
        shares[load] = num_met / num_counted
        if shares[load] < SHARE * alone[deployed.workload, deployed.scale]:
            break
    return shares


def table(
    workers: ModelledWorkers,
    calibrations: Mapping[str, IdleAndFull],
    alone: Mapping[tuple[str, float], float],
    results: Mapping[RateCase, Mapping[float, float]],
) -> str:
    half = workers.num_workers // 2
    rows = []
    for (workload, scale), most in alone.items():
        here = {
            (each.mode, each.num_prefill): shares
            for each, shares in results.items()
            if (each.workload, each.scale) == (workload, scale)
        }
        remote = {count: shares for (mode, count), shares in here.items() if mode == "remote"}
        auto, colocated = here["auto", half], here["colocated", 0]
        for name, share in (("all requests", SHARE), (f"the {100 * most:.0f} % that meet it alone", SHARE * most)):
            goal = RateGoal(share, calibrations[workload].capacity)
            best = max(remote, key=lambda count: (goal.load(remote[count]), count == half))
            fixed = [colocated, remote[half]]
            rows.append(
                (
                    f"{workload}, {scale:g} x idle: 90 % of {name}",
                    *(goal.rate(shares) for shares in (*fixed, auto)),
                    goal.ratio(auto, fixed),
                    f"{goal.rate(remote[best])} ({best}P+{workers.num_workers - best}D)",
                    goal.ratio(auto, [colocated, remote[best]]),
                )
            )
    header = ("workload, SLO", "colocated", "remote", "auto", "auto / better mode", "remote, best split")
    return markdown_table((*header, "auto / better mode with it"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes.attainable", description=__doc__)
    add = parser.add_argument
    add("--workload", nargs="+", choices=("short", "mixed", "long"), default=["mixed"])
    add("--slo", type=float, nargs="+", default=list(SLO_SCALES), help="times the idle latencies; default: %(default)s")
    add("--requests", type=int, default=100, help="for each pair of workers at each load; default: %(default)s")
    add("--seeds", type=int, default=2)
    add("--docs", action="store_true", help="write docs/modes.md")
    options = parser.parse_args(argv)
    parts: list[str] = []
    with ProcessPoolExecutor() as pool:
        for workers in (core_of_135m(), gpus()):
            found = zip(options.workload, pool.map(partial(calibrate, workers), options.workload), strict=True)
            calibrations = dict(found)
            cases = [(name, scale) for name in options.workload for scale in options.slo]
            shares = pool.map(partial(share_alone, workers, calibrations), cases)
            alone = dict(zip(cases, shares, strict=True))
            deployed = list(deployments_of(workers, options.workload, options.slo))
            count = options.requests * workers.num_workers // 2
            run = partial(attain, workers, calibrations, alone, count, options.seeds)
            results = dict(zip(deployed, pool.map(run, deployed), strict=True))
            parts += [f"{workers.name}, requests/s:", table(workers, calibrations, alone, results)]
            print("\n\n".join(parts[-2:]), flush=True)
            for each, attained in results.items():
                print(each, " ".join(f"{load:g}: {share:.3f}" for load, share in attained.items()), flush=True)
    if options.docs:
        replace_between(Path(DOCS) / "modes.md", BEGIN, END, "\n\n".join(parts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
