"""Replays traces at more load than the workers can take, under each policy, and writes results, tables and charts.

Traces come from the folder in PENSTOCK_TRACES; without it only the generated traffic runs, and the page is not changed.
`--page-only` replays nothing and writes the page from the results of the last run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from benchmarks.common.report import RESULTS, versions
from benchmarks.overload.report import Study, judgement_table, write_docs
from benchmarks.overload.study import LOADS, POLICIES, TRAFFIC, RunResult, TracePart, cases, run_all
from penstock.errors import InvalidInput

FILE = RESULTS / "overload.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--load", type=float, action="append", help="may be repeated; default: 1.2, 1.6 and 2")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="may be repeated; default: all")
    parser.add_argument("--traffic", choices=[each.name for each in TRAFFIC], action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each case, whose figures are averaged")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--print", action="store_true", help="write no file")
    parser.add_argument("--page-only", action="store_true")
    args = parser.parse_args(argv)
    if args.page_only:
        write_docs([RunResult.from_json(each) for each in json.loads(FILE.read_text())["runs"]])
        return 0
    traffic = _available([each for each in TRAFFIC if not args.traffic or each.name in args.traffic])
    runs = cases(traffic, args.load or LOADS, args.policy or POLICIES, args.seeds)
    results = []
    for case, result in zip(runs, run_all(runs, args.processes), strict=True):
        results.append(result)
        found = result.summary
        print(
            f"{case!s:60} hits {result.kept_hits:4.0%}  TTFT {found.ttft_p50_s:6.2f} {found.ttft_p90_s:6.2f} "
            f"{found.ttft_p99_s:6.2f} s  TPOT p99 {1e3 * found.tpot_p99_s:5.1f} ms  prefill max/mean "
            f"{found.imbalance:.2f}  decode {found.decode_imbalance:.2f}  failed {found.num_failed}",
            flush=True,
        )
    header, rows = judgement_table(Study(results))
    print("\n" + "\n".join(" | ".join(row) for row in (header, *rows)))
    if not args.print:
        value = {"name": "overload", "versions": versions(), "runs": [each.to_json() for each in results]}
        FILE.write_text(json.dumps(value, indent=2) + "\n")
        if len(traffic) == len(TRAFFIC):
            write_docs(results)
    return 0


def _available(traffic: Sequence[TracePart]) -> list[TracePart]:
    found = []
    for each in traffic:
        try:
            each.requests(0)
        except InvalidInput as error:
            print(f"skipped: {each.name}: {error}")
        else:
            found.append(each)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
