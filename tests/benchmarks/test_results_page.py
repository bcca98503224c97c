"""Tests the charts of benchmark results, and the page that collects them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.common import bar_specs
from benchmarks.common.charts import charts_of, machine_of, rows_of, write_charts
from benchmarks.common.report import RESULTS, Curves, Row, distribution, publish, write_result
from benchmarks.common.results_page import SUBJECTS, main

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_an_undescribed_result_is_on_the_page(tmp_path: Path) -> None:
    publish("new_one", "two steps", [Row("start", 2.0, "s")], tmp_path / "results", quiet=True)
    main(["--results", str(tmp_path / "results"), "--docs", str(tmp_path)])
    assert "## New one" in (tmp_path / "results.md").read_text()
    assert "new_one" not in {subject.name for subject in SUBJECTS}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_every_spec_selects_rows(file: Path) -> None:
    result = {"name": file.stem} | json.loads(file.read_text())
    titles = [chart.title for chart in charts_of(result)]
    for spec in bar_specs.SPECS.get(file.stem, ()):
        assert any(title.startswith(spec.title) for title in titles), spec.title


def test_a_result_without_rows_gets_a_line_and_no_invented_figures(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "conformance.json").write_text('{"suite": {"passed": 3, "skipped": 1}}')
    main(["--results", str(results), "--docs", str(tmp_path / "docs")])
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "suite: passed 3, skipped 1." in page
    assert page.index("## Not yet run") < page.index("`make bench-vllm`")
    assert not list((tmp_path / "docs" / "results").iterdir())


def test_a_published_benchmark_has_charts_beside_its_result(tmp_path: Path) -> None:
    curves = distribution("TTFT at 2/s", "TTFT, ms", {"ours": [3.0, 1.0, 2.0], "none": []})
    rows = [Row("start", 2.0, "s", "peer", 4.0), Row("step", 5.0, "ms"), Row("start, again", 1.0, "s")]
    publish("unknown", "two steps", rows, tmp_path, quiet=True, curves=[curves])
    result = json.loads((tmp_path / "unknown.json").read_text())
    first, second, third = (tmp_path / f"unknown-{index}.svg" for index in range(3))
    assert {"Penstock", "peer", "start", "start, again", machine_of(result)} <= set(texts(first.read_text()))
    assert "step" in texts(second.read_text())
    assert {"TTFT at 2/s", "ours", machine_of(result)} <= set(texts(third.read_text()))
    publish("unknown", "one step", rows[:1], tmp_path, quiet=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["unknown-0.svg", "unknown.json"], "stale ones go"


def test_many_rows_of_an_unknown_benchmark_are_split() -> None:
    names = [f"decode, batch {number}" for number in range(30)] + [f"prefill, {number}" for number in range(30)]
    rows = [{"metric": name, "value": 1.0, "unit": "us", "baseline": None} for name in (*names, "alone")]
    charts = charts_of({"name": "unknown", "rows": rows})
    assert [chart.title for chart in charts] == ["In us: decode", "In us: prefill"]


def test_kinds_are_side_by_side_under_one_name() -> None:
    rows = [
        {"metric": "TTFT p50 at 2/s, 1P+1D", "value": 2.0, "unit": "ms", "baseline": "Penstock colocated"}
        | {"baseline_value": 1.0},
        {"metric": "TTFT p50 at 2/s, colocated", "value": 1.0, "unit": "ms", "baseline": None, "baseline_value": None},
    ]
    (chart,) = charts_of({"name": "serving", "hardware": {"cores": 2, "cpu": "Some(R) CPU"}, "rows": rows})
    found = texts(chart.svg)
    assert [found.count(name) for name in ("Penstock 1P+1D", "Penstock colocated", "TTFT p50 at 2/s")] == [1, 1, 1]
    assert "2 cores of Some CPU" in found


def test_results_in_virtual_time_show_no_machine(tmp_path: Path) -> None:
    fields = {"hit_rate": 0.5, "ttft_p50_s": 1.0, "ttft_p99_s": 2.0, "tpot_p99_s": 0.1, "goodput": 1.0}
    row = {"trace": "some.jsonl.gz", "offered_load": 1.0, "cache_pages": "unlimited", "policy": "random"} | fields
    result = {"name": "replay", "rows": [row]}
    assert next(iter(rows_of(result)))["metric"] == "some at load 1, unlimited caches: hit rate, random"
    assert machine_of(result).startswith("virtual time")
    write_result(result, tmp_path)
    assert len(write_charts(result, tmp_path)) == 1


def test_a_distribution_keeps_its_ends() -> None:
    curves = distribution("t", "s", {"many": range(1, 10_001)})
    assert isinstance(curves, Curves)
    points = curves.series["many"]
    assert len(points) <= 102
    assert points[0] == (1.0, 0.0001)
    assert points[-1] == (10_000.0, 1.0)
    few = distribution("t", "s", {"few": [2.0, 1.0], "none": []})
    assert few.series == {"few": [(1.0, 0.5), (2.0, 1.0)], "none": []}
