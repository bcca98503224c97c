"""Tests the study of routing beyond the capacity: its runs, its ratios, and the page in docs/."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.overload.report import BEGIN, END, Study, figures_table, judgement_table, write_docs
from benchmarks.overload.study import Run, RunResult, TracePart, cases, run
from penstock.errors import InvalidInput
from simulator.replay import GENERATED
from simulator.report import Summary

SUMMARY = Summary(100, 0, 0.4, 1.1, 1.2, 0.9, 1.0, 2.0, 4.0, 0.02, 0.05, 0.5, 10.0)


def result(policy: str, load: float, **changed: float) -> RunResult:
    return RunResult("some, trace", load, policy, 0, 3.0, 0.5, replace(SUMMARY, **changed))


def results() -> list[RunResult]:
    return [
        result("kv-aware", 1.2, hit_rate=0.36),
        result("consistent-hash", 1.2, hit_rate=0.4, ttft_p50_s=2.0, ttft_p99_s=3.2),
        result("least-loaded", 1.2, hit_rate=0.1, ttft_p50_s=1.25, tpot_p99_s=0.04),
    ]


def test_ratios_compare_the_policy_with_the_best_other_one() -> None:
    header, rows = judgement_table(Study(results()))
    cells = dict(zip(header, rows[0], strict=True))
    assert cells["hits / consistent hash's"] == "0.90"
    assert cells["TTFT p50 / best other"] == "0.80"
    assert cells["p99 / best"] == "1.25"
    assert cells["TPOT p99 / least loaded"] == "1.25"
    assert cells["decode max/mean"] == "1.20"


def test_a_policy_that_did_not_run_is_left_out() -> None:
    _, rows = judgement_table(Study(results()[:1]))
    assert rows == [["some, trace, 1.2", "-", "-", "-", "-", "-", "1.20"]]
    assert [row[0] for row in figures_table(Study(results()), "some, trace")[1]] == [
        f"1.2, {policy}" for policy in ("kv-aware", "consistent-hash", "least-loaded")
    ]


def test_the_page_gets_tables_and_charts(tmp_path: Path) -> None:
    (tmp_path / "overload.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(results(), tmp_path)
    write_docs(results(), tmp_path)  # the marks are still there
    text = (tmp_path / "overload.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| 1.2, kv-aware | 72% |" in text
    files = sorted((tmp_path / "overload").iterdir())
    assert [file.name for file in files] == [f"some-trace-{index}.svg" for index in range(4)]
    for file in files:
        ET.parse(file)
        assert f"(overload/{file.name})" in text


def test_results_are_read_back_from_their_file() -> None:
    made = result("kv-aware", 1.2)
    assert RunResult.from_json(made.to_json()) == made


def test_a_run_offers_the_load_in_its_name() -> None:
    few = TracePart("few", GENERATED, limit=400)
    found = run(Run(few, 1.5, "least-loaded"))
    assert found.summary.num_requests == 400
    assert found.summary.num_failed == 0
    assert 0.0 < found.kept_hits <= 1.0
    assert len(cases([few], (1.2, 2.0), ("kv-aware", "round-robin"), 3)) == 12


def test_a_part_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has 100 requests after the first 300"):
        TracePart("rest", GENERATED, skipped=300, limit=100).requests(0)
