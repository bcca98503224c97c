"""Compares kernels, whole steps and transfers on a CUDA device with the device's limits (`make gpu-check`).

Sections run in order of importance, starting with the first transfer between two processes and the figures that the
engine must meet. Each has a time limit, after which it ends with its current row. Every row is printed and written as
soon as it is measured. A section that fails is reported, and the others still run. `--resume` continues after the
sections that an earlier run has begun, so several short runs do the work of a long one. `--rehearse` runs everything
without a GPU, at toy shapes, into a given folder; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from benchmarks.common.report import RESULTS, Row, publish, show
from benchmarks.gpu.bench_device import BenchDevice, RehearsalDevice
from benchmarks.gpu.checks import large_pool_rows, sanitizer_rows
from benchmarks.gpu.collectives import sum_rows
from benchmarks.gpu.figures import attention_figures, is_met, measure_ceilings, step_figures
from benchmarks.gpu.kernels import (
    decode_rows,
    early_launch_rows,
    library_rows,
    memory_rows,
    prefill_rows,
    quantized_rows,
    routing_rows,
    sampling_rows,
)
from benchmarks.gpu.prompt_stream import prompt_stream_rows
from benchmarks.gpu.roles import role_rows
from benchmarks.gpu.steps import expert_step_rows, other_step_rows
from benchmarks.gpu.transfer import smoke_rows, transfer_rows
from engine.kernels.backends import select_backend, select_ops


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that are measured within a time limit."""

    name: str
    within_s: float
    rows: Callable[[], Iterable[Row]]


def sections(bench: BenchDevice, found: list[Row]) -> list[Section]:
    """Returns all sections, after appending the rows of the ceilings, the baselines of all others, to `found`."""
    ceilings, rows = measure_ceilings(bench)
    found += rows
    backend = select_backend("triton", bench.device)
    copy = ceilings.bytes_per_s
    ops = select_ops(backend)
    all_sections = [
        Section("first transfer", 60, lambda: smoke_rows(bench)),
        Section("figures of attention", 60, lambda: attention_figures(bench, backend, ceilings)),
        Section("figures of 8B", 180, lambda: step_figures(bench, "8B", ceilings)),
        Section("figures of 0.6B", 90, lambda: step_figures(bench, "0.6B", ceilings)),
        Section("decode attention", 45, lambda: decode_rows(bench, backend, copy)),
        Section("prefill attention", 45, lambda: prefill_rows(bench, backend, ceilings.products_per_s)),
        Section("what moves memory", 30, lambda: memory_rows(bench, backend, ops, copy)),
        Section("sampling", 30, lambda: sampling_rows(bench)),
        Section("quantized products", 45, lambda: quantized_rows(bench)),
        Section("sums over ranks", 60, lambda: sum_rows(bench)),
        Section("early launches", 15, lambda: early_launch_rows(bench, ops)),
        Section("routing of experts", 15, lambda: routing_rows(bench, ops)),
        Section("libraries", 60, lambda: library_rows(bench, backend)),
        Section("roles", 120, lambda: role_rows(bench)),
        Section("prompts beside streams", 150, lambda: prompt_stream_rows(bench)),
        Section("large pool", 60, lambda: large_pool_rows(bench, backend)),
        Section("steps of 30B-A3B", 240, lambda: expert_step_rows(bench, "30B-A3B", ceilings)),
        Section("sanitizer", 250, lambda: sanitizer_rows(bench)),
        Section("transfers", 75, lambda: transfer_rows(bench, copy)),
        Section("other steps of 0.6B", 60, lambda: other_step_rows(bench, "0.6B", ceilings)),
        Section("other steps of 135M", 60, lambda: other_step_rows(bench, "135M", ceilings)),
    ]
    same = bench.pick((), ("figures of 0.6B", "other steps of 135M"))  # the same as others at toy shapes
    return [section for section in all_sections if section.name not in same]


@dataclass(slots=True)
class SectionProgress:
    """The sections that have begun, kept in a file: a run that continues begins none of them again, also if one of them
    has ended its process.
    """

    file: Path
    begun: list[str]

    @classmethod
    def read(cls, folder: Path, resume: bool) -> SectionProgress:
        file = folder / "gpu-sections.json"
        return cls(file, json.loads(file.read_text()) if resume and file.exists() else [])

    def begin(self, section: Section) -> None:
        self.begun.append(section.name)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.begun))


def run(
    bench: BenchDevice, seconds: float, folder: Path, only: str = "", resume: bool = False
) -> tuple[list[Row], list[str]]:
    """Returns the measured rows and the problems. Begins no section after `seconds`. With `resume`, continues after the
    sections that an earlier run has begun, and keeps its rows.
    """
    end_s = time.monotonic() + seconds
    progress = SectionProgress.read(folder, resume)
    found: list[Row] = []
    earlier = _rows_in(folder / "gpu.json") if progress.begun else []
    problems: list[str] = []
    device = f"{bench.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    workload = f"{device}; 8B and 0.6B are Llama-3.1-8B's and Qwen3-0.6B's sizes, random weights, bf16, page 16"
    all_sections = sections(bench, found)
    if earlier:
        found[:] = earlier
    for section in all_sections:
        if only not in section.name or section.name in progress.begun:
            continue
        started_s = time.monotonic()
        section_end_s = min(end_s, started_s + section.within_s)
        try:
            if started_s > end_s:
                raise TimeoutError(f"not started: {seconds:.0f} s are over")
            progress.begin(section)
            for row in section.rows():
                found.append(row)
                print(f"  {row.metric}: {row.value:.4g} {row.unit}", flush=True)
                publish("gpu", workload, found, folder, quiet=True)  # ending this process loses only later rows
                if time.monotonic() > section_end_s:
                    raise TimeoutError(f"ended after {row.metric!r}, {time.monotonic() - started_s:.0f} s")
        except Exception as error:
            problems.append(f"{section.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"{section.name}: {time.monotonic() - started_s:.1f} s", flush=True)
        publish("gpu", workload, found, folder, quiet=True)
        gc.collect()  # frees engines
        bench.cuda.empty_cache()
    return found, problems


def _rows_in(file: Path) -> list[Row]:
    """Returns the rows of an earlier run, if its file exists."""
    if not file.exists():
        return []
    names = [field.name for field in fields(Row)]
    return [Row(**{name: row[name] for name in names}) for row in json.loads(file.read_text())["rows"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy shapes; TRITON_INTERPRET=1")
    parser.add_argument(
        "--seconds", type=float, default=400, help="no section starts after this time; default: %(default)s"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="NAME", help="run the sections whose name contains this")
    parser.add_argument("--resume", action="store_true", help="continue after the sections that a run has begun")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; none was found. Give --rehearse to run it without", file=sys.stderr)
        return 2
    if arguments.rehearse and arguments.results == RESULTS:
        print("benchmarks.gpu: a rehearsal measures nothing; give --results DIR, another folder", file=sys.stderr)
        return 2
    bench = RehearsalDevice() if arguments.rehearse else BenchDevice()
    found, problems = run(bench, arguments.seconds, arguments.results, arguments.only, arguments.resume)
    show("gpu", bench.cuda.get_device_name(), found)
    checks = [row for row in found if is_met(row) is not None]
    show("checks", "repeated at the end", checks)
    print(f"{sum(bool(is_met(row)) for row in checks)} of {len(checks)} figures are met")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
