"""Tests what `benchmarks.modes` derives from measured results: pooled rounds, tables, charts, and the page in docs/."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.modes import attainable, virtual
from benchmarks.modes.deployments import AUTO, COLOCATED, SPLIT
from benchmarks.modes.report import BEGIN, END, goodput_table, latency_table, rows_of, write_docs, write_page
from benchmarks.modes.study import SLO_SCALES, Calibration, WorkloadStudy, pooled
from benchmarks.modes.traffic import long_prompts, mixed_prompts, short_prompts
from penstock.bench.results.result_file import BenchResult, make_point
from tests.penstock.bench.made_runs import steady_result

CALIBRATION = Calibration(ttft_s=0.05, tpot_s=0.01, capacity=12.0)


def result(ttft_s: float, itl_s: float, seed: int) -> BenchResult:
    made = steady_result(ttft_s, itl_s, seed, count=40)
    slos = CALIBRATION.slos()
    points = [make_point(f"{rate:g} requests/s", {"rate": rate}, made.points[0].run, slos) for rate in (5.0, 10.0)]
    return replace(made, slos=slos, points=points)


def study(folder: Path) -> WorkloadStudy:
    made = WorkloadStudy("short", folder, CALIBRATION)
    made.add(COLOCATED, result(0.1, 0.04, 1))
    made.add(SPLIT, result(0.2, 0.02, 2))
    made.add(AUTO, result(0.1, 0.02, 3))
    return made


def test_slos_follow_from_the_idle_latencies() -> None:
    limits = [slo.limits[""] for slo in CALIBRATION.slos()]
    assert [limit.ttft for limit in limits] == pytest.approx([0.05 * scale for scale in SLO_SCALES])
    assert [limit.tpot for limit in limits] == pytest.approx([0.01 * scale for scale in SLO_SCALES])


def test_a_study_is_kept_between_runs(tmp_path: Path) -> None:
    made = study(tmp_path / "short")
    made.save()
    found = WorkloadStudy.load("short", tmp_path, (COLOCATED, SPLIT, AUTO))
    assert found.calibration == CALIBRATION
    assert found.results.keys() == made.results.keys()
    assert [point.figures.num_requests for point in found.results[SPLIT].points] == [40, 40]


def test_rounds_are_pooled_point_by_point() -> None:
    both = pooled(result(0.1, 0.04, 1), result(0.3, 0.04, 2))
    assert [point.figures.num_requests for point in both.points] == [80, 80]
    requests = both.points[0].run.requests
    assert [request.number for request in requests] == list(range(80))
    assert requests[40].sent_s > requests[39].sent_s
    more = replace(result(0.1, 0.04, 1), points=[replace(both.points[0], name="1 requests/s", offered={"rate": 1.0})])
    assert [point.name for point in pooled(both, more).points] == ["1 requests/s", "5 requests/s", "10 requests/s"]


def test_tables_state_the_better_mode_with_figures(tmp_path: Path) -> None:
    made = study(tmp_path)
    header, rows = goodput_table([made])
    assert list(header) == ["goodput, requests/s", COLOCATED, SPLIT, AUTO, f"{AUTO} / better of both"]
    assert len(rows) == len(SLO_SCALES)
    header, rows = latency_table(made)
    assert [row[0] for row in rows][:3] == [f"5 requests/s, {mode}" for mode in (COLOCATED, SPLIT, AUTO)]
    assert rows[0][-1] == "-"
    ratio, low, high = (float(part) for part in rows[1][-2].replace("(", "").replace(")", "").replace("-", " ").split())
    assert low < 2.0 < high
    assert 1.8 < ratio < 2.2
    assert all(row.baseline == COLOCATED for row in rows_of([made]))


def test_pages_are_written_between_their_marks(tmp_path: Path) -> None:
    made = study(tmp_path / "build")
    (tmp_path / "modes.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs([made], tmp_path)
    text = (tmp_path / "modes.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    charts = sorted((tmp_path / "modes").glob("*.svg"))
    assert len(charts) == 4
    for chart in charts:
        ET.fromstring(chart.read_text())
        assert f"](modes/{chart.name})" in text
    write_docs([made], tmp_path)
    assert (tmp_path / "modes.md").read_text() == text
    write_page([made], tmp_path / "modes.html")
    assert "<h2>short</h2>" in (tmp_path / "modes.html").read_text()


def test_mixed_traffic_has_prompts_of_both_kinds() -> None:
    lengths = [draft.prompt.num_tokens for draft in mixed_prompts(200, 0).drafts]  # type: ignore[union-attr]
    assert 20 < sum(length >= 512 for length in lengths) < 60
    assert max(draft.prompt.num_tokens for draft in short_prompts(50, 0).drafts) <= 192  # type: ignore[union-attr]
    assert min(draft.prompt.num_tokens for draft in long_prompts(50, 0).drafts) >= 512  # type: ignore[union-attr]


def test_the_sweep_in_virtual_time_compares_the_modes_at_a_point() -> None:
    machines = virtual.core_of_135m()
    calibrations = {"long": virtual.calibrate(machines, "long")}
    idle = calibrations["long"].idle
    assert 0.5 < idle.ttft_s < 1.5
    case = virtual.SweepPoint("long", 5.0, 0.7)
    points = virtual.measure(machines, calibrations, 60, 1, case)
    assert {mode: len(point.ttft_s) for mode, point in points.items()} == dict.fromkeys(virtual.MODES, 45)
    ratios = virtual.Ratios.of(points)
    assert ratios.ttft_p50 < 1.2  # beside two colocated workers; one prefill worker alone cannot keep up
    assert points["remote"].ttft(0.9) > 2 * points["colocated"].ttft(0.9)
    assert all(point.itl_p99_s < 1.2 * 5.0 * idle.tpot_s for point in points.values())
    assert "long, 5 x idle, 0.7" in virtual.table({case: points}, calibrations)
    assert {row.metric.split(",")[0] for row in virtual.rows_of(machines, {case: points})} == {
        "goodput", "TTFT p50", "TTFT p90"
    }  # fmt: skip


def test_the_highest_load_is_interpolated_where_too_few_requests_meet_the_slo() -> None:
    assert attainable.highest_load({0.5: 1.0, 1.0: 0.8}, 0.9) == pytest.approx(0.75)
    assert attainable.highest_load({0.5: 0.8, 1.0: 0.7}, 0.9) is None
    assert attainable.highest_load({0.5: 1.0, 1.0: 0.95}, 0.9) == 1.0
    # A share that recovers by chance does not count.
    assert attainable.highest_load({0.5: 0.95, 0.7: 0.85, 1.0: 0.95}, 0.9) == pytest.approx(0.6)


def test_attainable_rates_are_compared_with_the_better_mode_and_the_best_split() -> None:
    machines = replace(virtual.core_of_135m(), num_workers=4)
    calibrations = {"mixed": virtual.IdleAndFull(virtual.LatencyLimits(0.1, 0.01), 10.0)}
    made = list(attainable.deployments_of(machines, ["mixed"], [5.0]))
    assert [(each.mode, each.num_prefill) for each in made] == [
        ("colocated", 0), ("remote", 1), ("remote", 2), ("remote", 3), ("auto", 2)
    ]  # fmt: skip
    shares: list[dict[float, float]] = [
        {0.5: 1.0, 1.0: 0.8}, {0.5: 0.7}, {0.5: 0.95, 0.7: 0.75}, {0.5: 1.0, 1.0: 0.95, 1.2: 0.7}, {0.5: 1.0, 1.6: 1.0}
    ]  # fmt: skip
    text = attainable.table(machines, calibrations, {("mixed", 5.0): 1.0}, dict(zip(made, shares, strict=True)))
    row = next(line for line in text.splitlines() if "90 % of all requests" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["7.5", "5.5", ">= 16", "2.13", "10.4 (3P+1D)", "1.54"]


def test_pairs_may_have_any_number_of_prefill_workers() -> None:
    machines = replace(virtual.gpus(), num_prefill=5)
    spec = machines.spec("remote", None)
    assert (spec.num_prefill, spec.num_decode) == (5, 3)
    spec = machines.spec("colocated", None)
    assert (spec.num_prefill, spec.num_decode) == (0, 8)
