"""Tests the benchmarks of virtual time on a few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulator import __main__ as speed
from benchmarks.simulator import scale


def test_the_benchmark_compares_pending_reports_with_sent_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = speed.SpeedCase("a small mix", speed.GENERATED, 2, 1.0, 40)
    missing = speed.SpeedCase("a trace that is not there", "no_such_trace.jsonl", 2, 1.0, 40)
    monkeypatch.setattr(speed, "CASES", (small, missing))
    assert speed.main(["--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "simulator.json").read_text())["rows"]
    assert [row["metric"] for row in rows] == ["a small mix", "a small mix, events"]
    assert rows[1]["value"] < rows[1]["baseline_value"]


def test_the_benchmark_at_scale_writes_the_runs_figures(tmp_path: Path) -> None:
    options = ["--workers", "4", "--requests", "30", "--cache-pages", "300"]
    assert scale.main([*options, "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "simulator_scale.json").read_text())
    figures = {row["metric"]: row["value"] for row in result["rows"]}
    assert (figures["requests"], figures["not complete"]) == (30, 0)
    assert result["workload"].startswith("4 workers, conversations")
