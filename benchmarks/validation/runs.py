"""Lists what each shape serves, run by run, and holds what was measured, as a JSON file from which to predict again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.validation.workloads import WORKLOADS, make_calibration, make_workload, sequential
from penstock.types import Role, StepTotals
from simulator.costs.records import StepRecord
from simulator.request import TraceRequest

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
NUM_PAGES = 4000  # of each worker
SHAPES = {"disaggregated": (1, 1), "colocated": (0, 1)}  # prefill and decode workers
CALIBRATIONS = (
    "calibration",
    "calibration again",
)  # the first and the last run, as the speed of a machine drifts
REFERENCE = "alone"  # begins the names of runs of short requests that are alone
LONG_REFERENCE = "long alone"
REFERENCES = (REFERENCE, LONG_REFERENCE)
_LONG_PROMPT = 640  # tokens
DISTURBED = 0.05  # share of the cores that other programs may take during a run
_SEEDS_A_ROUND = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one worker: killed if `stall_s` is None, otherwise stopped for that time."""

    worker: str
    at_s: float  # after the start of the run
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Requests that a deployment serves before its next run."""

    name: str
    requests: Sequence[TraceRequest]
    fault: Fault | None = None
    is_compared: bool = True


@dataclass(slots=True)
class Latencies:
    """Latencies as clients saw them, in seconds; `ttft_s` by request."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # mean of each request with several tokens
    num_tokens: int = 0
    num_failed: int = 0
    elapsed_s: float = 0.0
    num_elsewhere: int = 0  # prompts computed by a prefill worker, wholly or in part
    others_share: float | None = None  # share of the cores that other programs took meanwhile, if it was measured
    hops_s: list[float] = field(default_factory=list)  # calls to the prefill worker and back, of such whole prompts
    cpu_s: dict[str, float] = field(default_factory=dict)  # processor time by process, also of the client
    first_cpu_s: list[dict[str, float]] = field(default_factory=list)  # until the first token, by request and process
    later_cpu_s: list[dict[str, float]] = field(default_factory=list)  # for each later token

    def note_cpu(self, clocks_s: Sequence[dict[str, float]], num_later: int) -> None:
        """Takes the processor times of all processes as a request that is alone is sent, and at its first and last
        token.
        """
        sent_s, first_s, last_s = clocks_s
        self.first_cpu_s.append({name: first_s[name] - sent_s[name] for name in sent_s})
        self.later_cpu_s.append({name: (last_s[name] - first_s[name]) / num_later for name in sent_s})

    @property
    def is_disturbed(self) -> bool:
        return (self.others_share or 0.0) > DISTURBED

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0


def num_threads(num_workers: int) -> int:
    """Returns the threads of each worker of a deployment."""
    return 2 if num_workers == 1 else 1


def pool(rounds: Sequence[Latencies]) -> Latencies:
    """Returns the latencies of all rounds as those of one run."""
    pooled = Latencies()
    for one in rounds:
        pooled.ttft_s += one.ttft_s
        pooled.itl_s += one.itl_s
        pooled.hops_s += one.hops_s
        pooled.first_cpu_s += one.first_cpu_s
        pooled.later_cpu_s += one.later_cpu_s
        pooled.num_tokens += one.num_tokens
        pooled.num_failed += one.num_failed
        pooled.num_elsewhere += one.num_elsewhere
        pooled.elapsed_s += one.elapsed_s
    shares = [one.others_share for one in rounds if one.others_share is not None]
    pooled.others_share = max(shares, default=None)
    return pooled


@dataclass(frozen=True, slots=True)
class Measurement:
    """The latencies and the step records of one round of a shape's runs, by name of the run."""

    shape: str
    round: int
    seconds: float  # of each workload
    machine: Mapping[str, Any]  # date, hardware and versions
    records: dict[str, list[StepRecord]]
    runs: dict[str, Latencies]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.shape}-{self.round}.json").write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load_rounds(cls, folder: Path, shape: str) -> list[Measurement]:
        """Returns every round of a shape in the folder, of which there must be one."""
        found = [cls._load(path) for path in sorted(folder.glob(f"{shape}-[0-9].json"))]
        if not found:
            raise FileNotFoundError(f"{folder} has no measurement of {shape}; measure without --predict-only")
        return found

    @classmethod
    def _load(cls, path: Path) -> Measurement:
        data = json.loads(path.read_text())
        records = {name: list(map(_record, found)) for name, found in data.pop("records").items()}
        runs = {name: Latencies(**run) for name, run in data.pop("runs").items()}
        return cls(**data, records=records, runs=runs)


def _record(data: Mapping[str, Any]) -> StepRecord:
    return StepRecord(**{**data, "role": Role(data["role"]), "totals": StepTotals(**data["totals"])})


def fitted_runs(seconds: float, round: int = 0) -> list[PlannedRun]:
    """Returns the runs that costs are fitted to, of which the last follows the workloads and the first only warms up.

    No workload repeats their prompts.
    """
    seed = round * _SEEDS_A_ROUND
    return [
        PlannedRun("warm-up", sequential(6, seed + 90), is_compared=False),
        PlannedRun(LONG_REFERENCE, sequential(8, seed + 91, _LONG_PROMPT), is_compared=False),
        PlannedRun(CALIBRATIONS[0], make_calibration(seconds, seed + 92), is_compared=False),
        PlannedRun(CALIBRATIONS[1], make_calibration(seconds, seed + 94), is_compared=False),
    ]


def with_references(runs: Sequence[PlannedRun], seed: int) -> list[PlannedRun]:
    """Puts requests that are alone before, between and after the runs. They show how fast the machine is then."""
    planned: list[PlannedRun] = []
    for number, run in enumerate(runs):
        planned += [_reference(seed + number), run]
    return [*planned, _reference(seed + len(runs))]


def _reference(seed: int) -> PlannedRun:
    return PlannedRun(f"{REFERENCE} {seed % _SEEDS_A_ROUND}", sequential(4, seed), is_compared=False)


def deployments(shape: str, seconds: float, round: int) -> Iterator[tuple[tuple[int, int], list[PlannedRun]]]:
    """Yields the numbers of prefill and decode workers of each deployment, and what it serves. The first begins with
    the fitted runs. Requests of different rounds differ.
    """
    num_prefill, num_decode = SHAPES[shape]
    seed = round * _SEEDS_A_ROUND
    runs = [PlannedRun(name, make_workload(name, seconds, seed + number)) for number, name in enumerate(WORKLOADS)]
    if num_prefill:  # the link to the decode worker carries nothing while the prefill worker is stopped
        stalled = Fault("prefill-0", seconds / 2, stall_s=1.0)
        runs.append(PlannedRun("stalled link", make_workload("long prompts", seconds, seed + 7), stalled))
    warm_up, long_alone, before, after = fitted_runs(seconds, round)
    planned = with_references([before, *runs, after], seed + 50)
    yield (num_prefill, num_decode), [warm_up, long_alone, *planned]
    if num_prefill:  # streams of the killed worker continue at the other one
        killed = Fault("decode-1", seconds / 2)
        kill = PlannedRun("kill", make_workload("steady short", seconds, seed + 8), killed)
        warm_up = PlannedRun("warm-up of two", sequential(6, seed + 93), is_compared=False)
        yield (num_prefill, num_decode + 1), [warm_up, *with_references([kill], seed + 70)]
