"""Compares kernels, whole steps and transfers on a CUDA device with the device's limits (`make gpu-check`).

Sections run in order of importance, starting with the figures that the engine must meet. Each has a time limit, after
which it ends with its current row. Every row is printed and written as soon as it is measured. A section that fails is
reported, and the others still run. `--rehearse` runs everything without a GPU, at toy shapes, into a given folder; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.report import RESULTS, Row, publish, show
from benchmarks.gpu.bench_device import BenchDevice, RehearsalDevice
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
from benchmarks.gpu.steps import other_step_rows
from benchmarks.gpu.transfer import transfer_rows
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
        Section("figures of attention", 60, lambda: attention_figures(bench, backend, ceilings)),
        Section("figures of 8B", 150, lambda: step_figures(bench, "8B", ceilings)),
        Section("figures of 0.6B", 90, lambda: step_figures(bench, "0.6B", ceilings)),
        Section("decode attention", 45, lambda: decode_rows(bench, backend, copy)),
        Section("prefill attention", 45, lambda: prefill_rows(bench, backend, ceilings.products_per_s)),
        Section("what moves memory", 30, lambda: memory_rows(bench, backend, ops, copy)),
        Section("sampling", 30, lambda: sampling_rows(bench)),
        Section("quantized products", 45, lambda: quantized_rows(bench)),
        Section("sums over ranks", 60, lambda: sum_rows(bench)),
        Section("early launches", 15, lambda: early_launch_rows(bench, ops)),
        Section("routing of experts", 15, lambda: routing_rows(bench, ops)),
        Section("libraries", 30, lambda: library_rows(bench, backend)),
        Section("transfers", 75, lambda: transfer_rows(bench, copy)),
        Section("other steps of 0.6B", 60, lambda: other_step_rows(bench, "0.6B", ceilings)),
        Section("other steps of 135M", 60, lambda: other_step_rows(bench, "135M", ceilings)),
    ]
    same = bench.pick((), ("figures of 0.6B", "other steps of 135M"))  # the same as others at toy shapes
    return [section for section in all_sections if section.name not in same]


def run(bench: BenchDevice, seconds: float, folder: Path, only: str = "") -> tuple[list[Row], list[str]]:
    """Returns the measured rows and the problems. Stops after about `seconds`, whatever is left."""
    end_s = time.monotonic() + seconds
    found: list[Row] = []
    problems: list[str] = []
    device = f"{bench.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    workload = f"{device}; 8B and 0.6B are Llama-3.1-8B's and Qwen3-0.6B's sizes, random weights, bf16, page 16"
    for section in sections(bench, found):
        if only not in section.name:
            continue
        started_s = time.monotonic()
        section_end_s = min(end_s, started_s + section.within_s)
        try:
            if started_s > end_s:
                raise TimeoutError(f"not started: {seconds:.0f} s are over")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy shapes; TRITON_INTERPRET=1")
    parser.add_argument(
        "--seconds", type=float, default=400, help="no section starts after this time; default: %(default)s"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="NAME", help="run the sections whose name contains this")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; none was found. Give --rehearse to run it without", file=sys.stderr)
        return 2
    if arguments.rehearse and arguments.results == RESULTS:
        print("benchmarks.gpu: a rehearsal measures nothing; give --results DIR, another folder", file=sys.stderr)
        return 2
    bench = RehearsalDevice() if arguments.rehearse else BenchDevice()
    found, problems = run(bench, arguments.seconds, arguments.results, arguments.only)
    show("gpu", bench.cuda.get_device_name(), found)
    checks = [row for row in found if is_met(row) is not None]
    show("checks", "repeated at the end", checks)
    print(f"{sum(bool(is_met(row)) for row in checks)} of {len(checks)} figures are met")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
