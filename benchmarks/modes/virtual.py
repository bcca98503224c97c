"""Compares the modes in virtual time, where a whole sweep over loads and SLOs takes minutes.

Runs the real routing, placement and schedulers with modelled costs of steps and links (docs/simulator.md): workers that
compute their own prompts ("colocated"), pairs in which prefill workers compute every prompt ("remote"), and pairs that
decide for each prompt ("auto"). All get the same Poisson arrivals. The loads are shares of what the colocated workers
complete of a burst, and the SLOs multiples of the latencies of an idle worker; decode workers get the SLO's limits as
their targets. The first quarter of the requests only warms up. `--docs` writes the tables of docs/modes.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.common.docs_tables import markdown_table, replace_between
from benchmarks.common.report import Row, publish
from benchmarks.modes.report import DOCS
from benchmarks.modes.study import SLO_SCALES
from benchmarks.modes.traffic import long_prompts, mixed_prompts, short_prompts
from penstock.bench.results.quantiles import quantile
from penstock.bench.workloads.plan import PromptBlocks, Source
from penstock.config import DecodeConfig, PrefillConfig
from penstock.sizing.model_shape import find_shape
from simulator.costs.accelerators import find_accelerator
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.roofline import num_kv_tokens, roofline_costs
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.request import Outcome, TraceRequest

MODES = ("colocated", "remote", "auto")
LOADS = (0.5, 0.7, 0.85, 1.0)
BEGIN, END = "<!-- tables of benchmarks.modes.virtual -->", "<!-- end of the tables of virtual time -->"
_BLOCK = 16  # tokens
WARM_UP = 0.25  # share of the requests
_FIRST_S = 1.0  # time by which routers know their workers
_WORKLOADS: Mapping[str, Callable[[int, int], Source]] = {
    "short": short_prompts,
    "mixed": mixed_prompts,
    "long": long_prompts,
}


@dataclass(frozen=True, slots=True)
class ModelledWorkers:
    """Workers of one kind. Prompts of the workloads are `stretch` times as long, answers `stretch_answers` times."""

    name: str
    profile: CostProfile
    num_workers: int
    step_tokens: int
    num_pages: int
    stretch: int = 1
    stretch_answers: int = 1
    num_prefill: int | None = None  # in the modes with prefill workers; None: half of the workers

    def spec(self, mode: str, slo: LatencyLimits | None) -> FleetSpec:
        """Returns the deployment of a mode; decode workers get the SLO's limits as targets."""
        num_prefill = self.num_workers // 2 if self.num_prefill is None else self.num_prefill
        if mode == "colocated":
            num_prefill = 0
        decode = DecodeConfig(
            max_batch_tokens=self.step_tokens,
            max_batch_sequences=256,
            max_waiting=1 << 16,
            placement="auto" if mode == "auto" else "remote" if num_prefill else "local",
            itl_target_s=slo.tpot_s if slo else None,
        )
        spec = FleetSpec(num_prefill, self.num_workers - num_prefill, prefill_pages=self.num_pages, max_run=1)
        return replace(
            spec,
            decode_pages=self.num_pages,
            prefill=PrefillConfig(max_batch_tokens=self.step_tokens),
            decode=decode,
            timeout_s=36_000.0,
        ).with_costs(self.profile)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits that a request has to meet: the time to its first token and the mean time per token after it."""

    ttft_s: float
    tpot_s: float

    def is_met(self, outcome: Outcome) -> bool:
        return outcome.ttft_s is not None and outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s


@dataclass(slots=True)
class Point:
    """The results of one mode at one load as clients saw them, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    num_met: int = 0
    elapsed_s: float = 0.0

    @property
    def goodput(self) -> float:
        return self.num_met / self.elapsed_s

    def ttft(self, share: float) -> float:
        return quantile(sorted(self.ttft_s), share)

    @property
    def itl_p99_s(self) -> float:
        return quantile(sorted(self.itl_s), 0.99)


def core_of_135m() -> ModelledWorkers:
    """Returns two CPU cores with a 135M model, of whose order the costs are; a step's time was measured on one."""
    prompts = PrefillCosts(step_s=0.012, token_s=7e-4, context_s=1.2e-7)
    decode = DecodeCosts(0.0095, 8e-4, 1.5e-6, replace(prompts, step_s=0.0), mixed_s=0.004)
    link = LinkCosts(bytes_per_s=3e9, latency_s=1e-3, jitter_s=2e-4, token_bytes=23_040)
    source = "of the order of one core of an AMD EPYC with AVX-512-BF16"
    profile = CostProfile("135M on a core", source, prompts, decode, link, FrontCosts(request_s=0.003))
    return ModelledWorkers("two cores, 135M", profile, 2, step_tokens=256, num_pages=6000)


def gpus(name: str = "H100", model: str = "llama-3.1-8b", num_workers: int = 8) -> ModelledWorkers:
    """Returns GPUs with costs derived from published peaks; the prompts are eight times as long, answers four times."""
    shape, device = find_shape(model), find_accelerator(name)
    profile = roofline_costs(shape, device)
    num_pages = num_kv_tokens(shape, device) // _BLOCK
    return ModelledWorkers(f"{num_workers} {name}, {model}", profile, num_workers, 2048, num_pages, 8, 4)


def requests_of(workers: ModelledWorkers, workload: str, count: int, per_s: float, seed: int) -> Iterator[TraceRequest]:
    """Yields Poisson arrivals of prompts that share nothing; `per_s` = 0: all at once."""
    rng, at_s, block = random.Random(f"{workload} {seed}"), _FIRST_S, 0
    for number, draft in enumerate(_WORKLOADS[workload](count, seed).drafts):
        at_s += rng.expovariate(per_s) if per_s else 0.0
        assert isinstance(draft.prompt, PromptBlocks)
        num_input = workers.stretch * draft.prompt.num_tokens
        num_blocks = -(-num_input // _BLOCK)
        block_ids = tuple(range(block, block + num_blocks))
        block += num_blocks
        num_output = workers.stretch_answers * draft.num_output_tokens
        yield TraceRequest(number, at_s, num_input, num_output, block_ids, _BLOCK)


def simulate(
    spec: FleetSpec, requests: Iterator[TraceRequest], seed: int, slo: LatencyLimits | None = None, warm_up: float = 0.0
) -> Point:
    """Returns what the clients saw, except those of the first `warm_up` of the requests."""
    fleet = SimulatedFleet(spec, seed)
    fleet.sim.run(until_s=_FIRST_S)
    for request in requests:
        fleet.submit(request).gaps_s = []
    fleet.run()
    counted = fleet.outcomes[int(warm_up * len(fleet.outcomes)) :]
    point = Point(elapsed_s=fleet.sim.now_s - counted[0].request.arrival_s)
    for outcome in counted:
        assert outcome.is_complete, outcome
        assert outcome.ttft_s is not None
        assert outcome.gaps_s is not None
        point.ttft_s.append(outcome.ttft_s)
        point.itl_s += outcome.gaps_s
        point.num_met += slo is not None and slo.is_met(outcome)
    return point


@dataclass(frozen=True, slots=True)
class IdleAndFull:
    """The latencies of an idle colocated worker, and the requests/s of a burst at all of them."""

    idle: LatencyLimits
    capacity: float


def calibrate(workers: ModelledWorkers, workload: str) -> IdleAndFull:
    spec = workers.spec("colocated", None)
    alone = list(requests_of(workers, workload, 32, 0.0, seed=91))
    apart = (replace(request, arrival_s=_FIRST_S + 100.0 * request.number) for request in alone)
    idle = simulate(spec, apart, 91)
    burst = list(requests_of(workers, workload, 100 * workers.num_workers, 0.0, seed=92))
    full = simulate(spec, iter(burst), 92)
    return IdleAndFull(LatencyLimits(idle.ttft(0.5), quantile(sorted(idle.itl_s), 0.5)), len(burst) / full.elapsed_s)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A point of the sweep."""

    workload: str
    scale: float  # of the SLO, times idle
    load: float


def measure(
    workers: ModelledWorkers, calibrations: Mapping[str, IdleAndFull], count: int, seeds: int, case: SweepPoint
) -> dict[str, Point]:
    """Returns what each mode shows at one point, over all seeds."""
    found = calibrations[case.workload]
    slo = LatencyLimits(case.scale * found.idle.ttft_s, case.scale * found.idle.tpot_s)
    points: dict[str, Point] = {}
    for mode in MODES:
        total = points[mode] = Point()
        for seed in range(seeds):
            requests = requests_of(workers, case.workload, count, case.load * found.capacity, seed)
            point = simulate(workers.spec(mode, slo), requests, seed, slo, WARM_UP)
            total.ttft_s += point.ttft_s
            total.itl_s += point.itl_s
            total.num_met += point.num_met
            total.elapsed_s += point.elapsed_s
    return points


@dataclass(frozen=True, slots=True)
class Ratios:
    """Automatic placement beside the better of the two fixed modes."""

    ttft_p50: float
    ttft_p90: float
    itl_p99: float
    goodput: float | None  # None: neither fixed mode met the SLO at all

    @classmethod
    def of(cls, points: Mapping[str, Point]) -> Ratios:
        auto, fixed = points["auto"], [points["colocated"], points["remote"]]
        return cls(
            auto.ttft(0.5) / min(point.ttft(0.5) for point in fixed),
            auto.ttft(0.9) / min(point.ttft(0.9) for point in fixed),
            auto.itl_p99_s / min(point.itl_p99_s for point in fixed),
            auto.goodput / best if (best := max(point.goodput for point in fixed)) else None,
        )


def table(results: Mapping[SweepPoint, Mapping[str, Point]], calibrations: Mapping[str, IdleAndFull]) -> str:
    header = ("workload, SLO, load", "goodput/s: colocated / remote / auto", "goodput", "TTFT p50", "TTFT p90")
    rows = []
    for case, points in results.items():
        ratios = Ratios.of(points)
        target_s = case.scale * calibrations[case.workload].idle.tpot_s
        rows.append(
            (
                f"{case.workload}, {case.scale:g} x idle, {case.load:g}",
                " / ".join(f"{points[mode].goodput:.3g}" for mode in MODES),
                *(
                    "-" if ratio is None else f"{ratio:.2f}"
                    for ratio in (ratios.goodput, ratios.ttft_p50, ratios.ttft_p90)
                ),
                " / ".join(f"{points[mode].itl_p99_s / target_s:.2f}" for mode in MODES),
            )
        )
    return markdown_table((*header, "ITL p99 / target: colocated / remote / auto"), rows)


def summary(results: Mapping[SweepPoint, Mapping[str, Point]]) -> str:
    ratios = [Ratios.of(points) for points in results.values()]
    good = sorted(each.goodput for each in ratios if each.goodput is not None)
    slow = [max(each.ttft_p50, each.ttft_p90) for each in ratios]
    near = sum(each <= 1.05 for each in slow)
    return (
        f"At the {len(good)} of {len(ratios)} points where a fixed mode meets the SLO at all, automatic placement has "
        f"{good[0]:.2f} to {good[-1]:.2f} of the better one's goodput (median {quantile(good, 0.5):.2f}): at least "
        f"0.95 at {sum(each >= 0.95 for each in good)}, 1.3 or more at {sum(each >= 1.3 for each in good)}. Both TTFT "
        f"p50 and p90 are within 1.05 of the better mode's at {near} of all points, at worst {max(slow):.2f}."
    )


def rows_of(workers: ModelledWorkers, results: Mapping[SweepPoint, Mapping[str, Point]]) -> Iterator[Row]:
    for case, points in results.items():
        at = f"{workers.name}, {case.workload}, {case.scale:g} x idle, load {case.load:g}"
        fixed = [points["colocated"], points["remote"]]
        yield Row(
            f"goodput, {at}",
            points["auto"].goodput,
            "requests/s",
            "the better mode",
            max(each.goodput for each in fixed),
        )
        for share in (0.5, 0.9):
            best_s = min(each.ttft(share) for each in fixed)
            name = f"TTFT p{100 * share:g}, {at}"
            yield Row(name, 1e3 * points["auto"].ttft(share), "ms", "the better mode", 1e3 * best_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes.virtual", description=__doc__)
    add = parser.add_argument
    add("--workload", nargs="+", choices=_WORKLOADS, default=list(_WORKLOADS))
    add("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the capacity; default: %(default)s")
    add("--slo", type=float, nargs="+", default=list(SLO_SCALES), help="times the idle latencies; default: %(default)s")
    add("--requests", type=int, default=200, help="for each pair of workers at each point; default: %(default)s")
    add("--seeds", type=int, default=1)
    add("--docs", action="store_true", help="write docs/modes.md and the results")
    options = parser.parse_args(argv)
    parts: list[str] = []
    rows: list[Row] = []
    with ProcessPoolExecutor() as pool:
        for workers in (core_of_135m(), gpus()):
            found = zip(options.workload, pool.map(partial(calibrate, workers), options.workload), strict=True)
            calibrations = dict(found)
            cases = [
                SweepPoint(name, scale, load)
                for name in options.workload
                for scale in options.slo
                for load in options.loads
            ]
            count = options.requests * workers.num_workers // 2
            run = partial(measure, workers, calibrations, count, options.seeds)
            results = dict(zip(cases, pool.map(run, cases), strict=True))
            parts += [f"### {workers.name}", summary(results), table(results, calibrations)]
            rows += rows_of(workers, results)
            print("\n\n".join(parts[-3:]), flush=True)
    if options.docs:
        replace_between(Path(DOCS) / "modes.md", BEGIN, END, "\n\n".join(parts))
        seeds = "1 seed" if options.seeds == 1 else f"{options.seeds} seeds"
        publish("modes_virtual", f"{options.requests} requests for each pair of workers, {seeds}", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
