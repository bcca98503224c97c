"""Tests that every result can be reported as text, and as a page that loads nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from hypothesis import given

from penstock.bench.reports.html import html_report
from penstock.bench.reports.text import comparison_table, describe_result
from penstock.bench.results.compare import compare
from penstock.bench.results.record import RunRecord
from penstock.bench.results.result_file import make_point
from penstock.bench.results.slo import parse_slo
from penstock.charts.table import format_table
from tests.penstock.bench.made_runs import run_records, steady_result
from tests.support.suite.examples import examples

SLO = parse_slo("ttft=1,tpot=0.5")


@examples(20)
@given(run_records(), run_records())
def test_any_result_has_a_report_and_a_page(first: RunRecord, second: RunRecord) -> None:
    points = [
        make_point(f"point {index}", {"rate": index + 1.0}, run, [SLO]) for index, run in enumerate((first, second))
    ]
    result = replace(steady_result(1, 1, 0, count=2), label="<it>", points=points, slos=[SLO])
    text = describe_result(result)
    assert "== point 1 ==" in text
    page = html_report(result)
    assert "<title>&lt;it&gt;</title>" in page
    assert not re.search(r"(src|href)=|@import|url\(", page), "the page loads something"
    charts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    titles = [chart.findtext("{http://www.w3.org/2000/svg}title") for chart in charts]
    assert titles[:5] == ["Goodput", "SLO attainment", "TTFT", "ITL", "Throughput"]
    assert titles.count("Requests in flight") == 2, "a timeline for each point"


def test_a_comparison_is_a_table_of_ratios() -> None:
    (point,) = compare(steady_result(0.2, 0.02, 1), steady_result(0.2, 0.03, 2), resamples=100)
    text = format_table(*comparison_table(point))
    assert re.search(r"ITL p50 ms +\d+\S* +[23]\d\S* +1\.[45]\d+ +1\.\d+ to 1\.\d+ +worse", text)
    assert re.search(r"hit rate +0\.5 +0\.5 +1\.000 .* no difference shown", text)
