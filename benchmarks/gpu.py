"""Kernels, whole steps and transfers on a CUDA device, beside what the device can do: `make gpu-check`.

Sections run in the order of their worth, the figures that the engine is held to first. Each has a time of its own, at
which it ends with the row it is at; what was measured is written after every section, and a section that fails is told
and does not keep the others from running. `--rehearse` runs all of it without a GPU, at toy shapes, into a folder that
is given: nothing there has a meaning but that it came to its end.
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

from benchmarks.gpu_figures import attention_figures, is_met, measure_ceilings, step_figures
from benchmarks.gpu_kernels import decode_rows, draw_rows, memory_rows, prefill_rows, quantized_rows
from benchmarks.gpu_libraries import library_rows
from benchmarks.gpu_steps import other_step_rows
from benchmarks.gpu_transfer import transfer_rows
from benchmarks.ground import Ground, Rehearsal
from benchmarks.report import RESULTS, Row, publish, show
from engine.kernels import select_backend, select_ops


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    within_s: float
    rows: Callable[[], Iterable[Row]]


def sections(ground: Ground, found: list[Row]) -> list[Section]:
    """`found` gets the ceilings, which all others are held against."""
    ceilings, rows = measure_ceilings(ground)
    found += rows
    backend = select_backend("triton", ground.device)
    copy = ceilings.bytes_per_s
    ops = select_ops(backend)
    all_sections = [
        Section("figures of attention", 60, lambda: attention_figures(ground, backend, ceilings)),
        Section("figures of 8B", 150, lambda: step_figures(ground, "8B", ceilings)),
        Section("figures of 0.6B", 90, lambda: step_figures(ground, "0.6B", ceilings)),
        Section("decode attention", 45, lambda: decode_rows(ground, backend, copy)),
        Section("prefill attention", 45, lambda: prefill_rows(ground, backend, ceilings.products_per_s)),
        Section("what moves memory", 30, lambda: memory_rows(ground, backend, ops, copy)),
        Section("draws", 30, lambda: draw_rows(ground)),
        Section("quantized products", 45, lambda: quantized_rows(ground)),
        Section("libraries", 30, lambda: library_rows(ground, backend)),
        Section("transfers", 75, lambda: transfer_rows(ground, copy)),
        Section("other steps of 0.6B", 60, lambda: other_step_rows(ground, "0.6B", ceilings)),
        Section("other steps of 135M", 60, lambda: other_step_rows(ground, "135M", ceilings)),
    ]
    same = ground.pick((), ("figures of 0.6B", "other steps of 135M"))  # as others, where shapes are toys
    return [section for section in all_sections if section.name not in same]


def run(ground: Ground, seconds: float, folder: Path, only: str = "") -> tuple[list[Row], list[str]]:
    """What was measured, and what went wrong. Ends about `seconds` after it began, whatever is left."""
    end_s = time.monotonic() + seconds
    found: list[Row] = []
    problems: list[str] = []
    device = f"{ground.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    workload = f"{device}; 8B and 0.6B are Llama-3.1-8B's and Qwen3-0.6B's sizes, random weights, bf16, page 16"
    for section in sections(ground, found):
        if only not in section.name:
            continue
        started_s = time.monotonic()
        section_end_s = min(end_s, started_s + section.within_s)
        try:
            if started_s > end_s:
                raise TimeoutError(f"not begun: {seconds:.0f} s are over")
            for row in section.rows():
                found.append(row)
                if time.monotonic() > section_end_s:
                    raise TimeoutError(f"ended after {row.metric!r}, {time.monotonic() - started_s:.0f} s")
        except Exception as error:
            problems.append(f"{section.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"{section.name}: {time.monotonic() - started_s:.1f} s", flush=True)
        publish("gpu", workload, found, folder, quiet=True)
        gc.collect()  # engines
        ground.cuda.empty_cache()
    return found, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy shapes; TRITON_INTERPRET=1")
    parser.add_argument("--seconds", type=float, default=400, help="after which no section begins; %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="NAME", help="sections whose name has this in it")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; none was found. Give --rehearse to run it without", file=sys.stderr)
        return 2
    if arguments.rehearse and arguments.results == RESULTS:
        print("benchmarks.gpu: a rehearsal measures nothing; give --results DIR, another folder", file=sys.stderr)
        return 2
    ground = Rehearsal() if arguments.rehearse else Ground()
    found, problems = run(ground, arguments.seconds, arguments.results, arguments.only)
    show("gpu", ground.cuda.get_device_name(), found)
    checks = [row for row in found if is_met(row) is not None]
    show("checks", "last, for those who read the end", checks)
    print(f"{sum(bool(is_met(row)) for row in checks)} of {len(checks)} figures are met")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
