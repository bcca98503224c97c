"""Tests figures, SLOs, result files and comparisons with random runs and known differences."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.results.compare import block_counts, compare
from penstock.bench.results.figures import figures_of, length_class
from penstock.bench.results.quantiles import Quantiles, quantile
from penstock.bench.results.record import Ending, RequestRecord, RunRecord
from penstock.bench.results.result_file import from_json, make_point, read_result, to_csv, to_json
from penstock.bench.results.slo import parse_slo
from penstock.errors import InvalidInput
from tests.penstock.bench.made_runs import run_records, steady_result

SLO = parse_slo("ttft=1,tpot=0.5")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0.001, 1))
def test_a_quantile_is_the_least_value_that_covers_its_share(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-6
    assert sum(value < found for value in ordered) < share * len(ordered) + 1e-6


@given(st.lists(st.floats(0, 100), max_size=50))
def test_quantiles_ascend(values: list[float]) -> None:
    found = Quantiles.of(values)
    assert (found is None) is (not values)
    if found is not None:
        assert found.p50_s <= found.p90_s <= found.p99_s <= found.p999_s <= found.max_s == max(values)
        assert found.count == len(values)


@given(run_records())
def test_every_failure_is_a_miss_and_no_request_is_lost(run: RunRecord) -> None:
    figures = figures_of(run, [SLO])
    (slo,) = figures.slos
    cancelled = figures.endings.get("cancelled", 0)
    assert sum(figures.endings.values()) == figures.num_requests == len(run.requests)
    assert slo.num_judged == len(run.requests) - cancelled
    assert slo.num_met <= figures.endings.get("complete", 0)
    assert slo.goodput == pytest.approx(slo.num_met / run.elapsed_s)
    assert figures.hit_rate is None or 0 <= figures.hit_rate <= 1
    for groups in (figures.by_length, figures.by_lane):
        for group in groups:
            assert 0 <= group.num_failed <= group.num_requests
            assert all(0 <= attainment <= 1 for attainment in group.attainments)
    known = sum(length_class(request) is not None for request in run.requests)
    assert sum(group.num_requests for group in figures.by_length) == known


@given(run_records())
def test_a_result_survives_its_file(run: RunRecord) -> None:
    run = replace(run, requests=tuple(replace(each, number=number) for number, each in enumerate(run.requests)))
    result = replace(steady_result(1, 1, 0, count=2), points=[make_point("it", {"rate": 2.0}, run, [SLO])], slos=[SLO])
    text = json.dumps(to_json(result))
    again = from_json(json.loads(text), "it")
    assert again == result
    assert json.dumps(to_json(again)) == text
    rows = list(csv.DictReader(io.StringIO(to_csv(result), newline="")))
    assert [row["ending"] for row in rows] == [request.ending.value for request in run.requests]
    assert [row["detail"] for row in rows] == [request.detail for request in run.requests]


def test_files_without_results_are_refused_by_path(tmp_path: Path) -> None:
    data = to_json(steady_result(1, 1, 0, count=2))
    cases: list[tuple[object, str]] = [
        ([], "is not a result of `penstock bench run`"),
        ({**data, "version": 9}, "has version 9; this program reads 1"),
        ({key: value for key, value in data.items() if key != "points"}, r"is damaged: KeyError\('points'\)"),
    ]
    for number, (content, message) in enumerate(cases):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(content))
        with pytest.raises(InvalidInput, match=message):
            read_result(file)
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(InvalidInput, match="is not valid JSON"):
        read_result(tmp_path / "text.json")
    with pytest.raises(InvalidInput, match="No such file"):
        read_result(tmp_path / "gone")


def record(ttft_s: float = 0.5, gap_s: float = 0.1, lane: str = "", ending: Ending = Ending.COMPLETE) -> RequestRecord:
    return RequestRecord(0, lane, 0, 0, ending, "", ttft_s, ttft_s + 9 * gap_s, (gap_s,) * 9, 10, 10, 10, 0, 10)


def test_an_slo_judges_each_lane_by_its_own_limits() -> None:
    slo = parse_slo("ttft=1;bulk:e2e=60")
    assert slo.is_met(record())
    assert not slo.is_met(record(ttft_s=2.0))
    assert slo.is_met(record(ttft_s=2.0, lane="bulk"))
    assert not slo.is_met(record(ending=Ending.TRUNCATED))
    assert not parse_slo("tpot=0.05").is_met(record())
    assert parse_slo("itl=0.2,tpot=0.2").is_met(record())
    assert not parse_slo("itl=0.05").is_met(record())


@pytest.mark.parametrize("text", ["", "ttft", "ttft=0", "ttft=x", "p99=1", "urgent:ttft=1", "bulk:"])
def test_malformed_slos_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="slo: "):
        parse_slo(text)


def test_the_load_generator_warns_about_its_own_lateness() -> None:
    run = steady_result(1.0, 0.02, 0).points[0].run
    assert not figures_of(run, []).generator.warnings
    late = tuple(replace(each, due_s=each.sent_s - 0.2) for each in run.requests)
    warnings = figures_of(replace(run, requests=late, lags_s=(0.05,) * 10), []).generator.warnings
    assert [warning.split(" ")[0] for warning in warnings] == ["1", "the"]
    assert "sent at least 200.0 ms late" in warnings[0]
    assert "50.0 ms late" in warnings[1]


@given(st.integers(1, 300), st.integers(0, 5))
def test_a_resample_has_as_many_requests_as_the_run(size: int, seed: int) -> None:
    counts = block_counts(size, random.Random(seed))
    assert len(counts) == size
    assert sum(counts) == size


def test_a_known_difference_is_reported_and_noise_is_not() -> None:
    a, same, slower = steady_result(0.2, 0.02, 1), steady_result(0.2, 0.02, 2), steady_result(0.2, 0.026, 3)
    (beside_same,) = compare(a, same, resamples=300)
    verdicts = {each.figure: each.verdict for each in beside_same.ratios}
    assert verdicts["TTFT p50"] == verdicts["ITL p50"] == verdicts["E2E p50"] == "no difference shown"
    (beside_slower,) = compare(a, slower, resamples=300)
    ratios = {each.figure: each for each in beside_slower.ratios}
    assert ratios["TTFT p50"].verdict == "no difference shown"
    itl = ratios["ITL p50"]
    assert itl.verdict == "worse"
    assert itl.low is not None
    assert itl.high is not None
    assert itl.low < 1.3 < itl.high
    assert math.isclose(itl.ratio or 0, 1.3, rel_tol=0.05)
    (turned,) = compare(slower, a, resamples=300)
    assert {each.figure: each.verdict for each in turned.ratios}["ITL p50"] == "better"


def test_intervals_cover_the_truth_about_as_often_as_they_claim() -> None:
    held = 0
    for seed in range(40):
        a, b = steady_result(0.2, 0.02, 2 * seed, count=30), steady_result(0.2, 0.02, 2 * seed + 1, count=30)
        (point,) = compare(a, b, seed, resamples=60)
        held += {each.figure: each for each in point.ratios}["TTFT p50"].verdict == "no difference shown"
    assert held >= 33, "an interval of 95 % that holds the truth in fewer than 33 of 40 runs is too narrow"


def test_too_few_requests_are_not_compared() -> None:
    few = steady_result(0.2, 0.02, 1, count=5)
    (point,) = compare(few, few)
    assert {each.verdict for each in point.ratios} == {"cannot be compared"}


def test_points_of_other_names_are_not_compared() -> None:
    a = steady_result(0.2, 0.02, 1)
    assert compare(a, replace(a, points=[replace(a.points[0], name="other")])) == []
