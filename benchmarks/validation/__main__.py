"""Compares predicted with measured figures: `python -m benchmarks.validation [--shape disaggregated] [--seconds 15]`.

Measures a deployment of the bundled model: calibration traffic, five workloads, a stalled link and a kill. Then fits
costs to the calibration and predicts the rest in virtual time. Each round of a shape takes three to four minutes and
has requests of its own; the latencies of all rounds are judged together. `--round` measures one of them. Measurements
stay in `build/validation`, and `--predict-only` predicts them again. Results of a shape replace its earlier ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.docs_tables import markdown_table, replace_between
from benchmarks.common.process_group import ROOT
from benchmarks.common.report import RESULTS, percentile, write_result
from benchmarks.validation.measured import measure_shape
from benchmarks.validation.predicted import fit_costs, predict_round
from benchmarks.validation.runs import DISTURBED, SHAPES, Latencies, Measurement, deployments, pool
from simulator.costs.cost_file import write_costs

_DOCS = ROOT / "docs" / "simulator.md"
_BEGIN, _END = "<!-- validation -->", "<!-- end of validation -->"
_BUILD = ROOT / "build" / "validation"
_ROUNDS = 3
# figure -> largest relative error
_BOUNDS = {"TTFT p50": 0.15, "TTFT p99": 0.3, "ITL p50": 0.15, "ITL p99": 0.3, "tokens/s": 0.15}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be repeated; default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each workload")
    parser.add_argument(
        "--round", type=int, choices=range(10), action="append", help="may be repeated; default: 0 to 2"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of runs that other programs disturb, in each round")
    parser.add_argument("--predict-only", action="store_true", help="measure nothing, read the earlier measurements")
    parser.add_argument("--build", type=Path, default=_BUILD, help="folder of the measurements")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=_DOCS, help="page whose table is replaced")
    args = parser.parse_args(argv)
    for shape in args.shape or SHAPES:
        if not args.predict_only:
            for round in args.round or range(_ROUNDS):
                asyncio.run(measure_shape(shape, round, args.seconds, args.repeats)).save(args.build)
        rounds = Measurement.load_rounds(args.build, shape)
        costs = fit_costs(rounds)
        write_costs(costs, args.build / f"costs-{shape}.json")
        predicted = [predict_round(one, costs) for one in rounds]
        first = rounds[0]
        compared = [run.name for _, runs in deployments(shape, first.seconds, 0) for run in runs if run.is_compared]
        rows = []
        for name in compared:
            rows += compare(
                shape, name, *judged([one.runs[name] for one in rounds], [each[name] for each in predicted])
            )
        publish(rows, first.machine, args.results, args.docs)
    return 0


def judged(seen: Sequence[Latencies], predicted: Sequence[Latencies]) -> tuple[Latencies, Latencies]:
    """Returns what the rounds of a run saw, and what was predicted for them, without those that other programs
    disturbed if any other is left.
    """
    quiet = [number for number, one in enumerate(seen) if not one.is_disturbed] or range(len(seen))
    return pool([seen[number] for number in quiet]), pool([predicted[number] for number in quiet])


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
            "others_share": seen.others_share,
            "num_requests": len(seen.ttft_s),
            "num_failed": seen.num_failed,
            "num_failed_predicted": expected.num_failed,
            "num_elsewhere": seen.num_elsewhere,
            "num_elsewhere_predicted": expected.num_elsewhere,
        }
        rows.append(row)
        mark = "" if abs(error) <= _BOUNDS[figure] else "  beyond the bound"
        print(
            f"{shape:14} {workload:16} {figure:9} {value:9.2f} {wanted[figure]:9.2f} {error:+7.1%}{mark}",
            flush=True,
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table: a line for each run, with figures as "measured / predicted (error)"."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cell = f"{row['measured']:.3g} / {row['predicted']:.3g} ({100 * row['error']:+.0f} %)"
        if abs(row["error"]) > row["bound"]:
            cell = f"**{cell}**"
        share = row["others_share"]
        others = "not measured" if share is None else f"{100 * share:.0f} %"
        if share is not None and share > DISTURBED:
            others = f"**{others}**"
        line = lines.setdefault((row["shape"], row["workload"]), {"others": others})
        line[row["figure"]] = cell
    header = [
        "",
        *(figure if figure.endswith("/s") else f"{figure}, ms" for figure in _BOUNDS),
        "other programs",
    ]
    body = [[", ".join(key), *(cells[figure] for figure in (*_BOUNDS, "others"))] for key, cells in lines.items()]
    return markdown_table(header, body)


def publish(
    rows: list[dict[str, object]],
    machine: Mapping[str, object],
    folder: Path,
    docs: Path,
) -> None:
    """Writes the rows together with other shapes' rows of earlier runs: JSON, the chart of all, and the docs' table."""
    file = folder / "validation.json"
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    new_shapes = {row["shape"] for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in [*kept, *rows]))
    rows = [row for row in kept if row["shape"] not in new_shapes] + rows
    rows.sort(key=lambda row: shapes.index(row["shape"]))
    within = sum(abs(float(str(row["error"]))) <= float(str(row["bound"])) for row in rows)
    write_result(
        {"name": "validation"} | dict(machine) | {"num_within": within, "rows": rows},
        folder,
    )
    replace_between(docs, _BEGIN, _END, table(rows))
    print(f"{within} of {len(rows)} figures within their bounds")


if __name__ == "__main__":
    raise SystemExit(main())
