"""Tests that output in a terminal of 80 columns fits and says the same as piped output."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.cli.commands.calling.generate import format_decision
from cluster.cli.commands.inspecting.doctor import format_finding
from cluster.cli.commands.inspecting.top import format_rates
from cluster.cli.commands.running import demo
from cluster.cli.commands.sizing.bench import write_files
from cluster.cli.main import main
from cluster.cli.rates import compute_rates
from cluster.diagnose.findings import Finding, Severity
from penstock.bench.reports.text import describe_result
from penstock.charts.table import format_table, name_rows, wrap
from penstock.client.results import Timing, Usage
from tests.cluster.cli.test_sizing import PLAN, STATISTICS, write_trace
from tests.cluster.cli.test_top import sample, worker
from tests.penstock.bench.made_runs import steady_result

COLUMNS = 80
MODEL = str(Path(__file__).resolve().parents[3] / "models" / "penstock-tiny")


class Terminal(io.StringIO):
    """Stands in for a terminal, whose width is that of COLUMNS."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def printed(*argv: str) -> str:
    """Returns what a command prints in a terminal."""
    with contextlib.redirect_stdout(Terminal()) as terminal:
        assert main(list(argv)) == 0
    return terminal.getvalue()


def assert_fits(text: str) -> None:
    assert text.strip()
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    "argv",
    [
        [*PLAN, *STATISTICS, "--accelerator", "H200=4.25"],
        ["plan-memory", MODEL],
        ["plan-memory", MODEL, "--device", "cpu:2GiB", "--context", "100"],
    ],
    ids=["plan", "plan-memory", "plan-memory of little"],
)
def test_sizing_commands(argv: list[str]) -> None:
    assert_fits(printed(*argv))


def test_traffic(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / f"{'long-name-' * 5}.jsonl")
    assert_fits(printed("traffic", str(trace), "--kv-bytes", "131072"))


def test_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, itl_s in (("a", 0.02), ("b", 0.03)):
        write_files(steady_result(0.2, itl_s, 1, count=60), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert_fits(printed("bench", "report", "a"))
    assert_fits(printed("bench", "compare", "a", "b"))
    result = steady_result(12.2, 0.03, 1, count=300)
    wide = SimpleNamespace(**{name: getattr(result, name) for name in ("workload", "target", "notes", "slos")})
    wide.points = [result.points[0]] * 2
    assert_fits(describe_result(wide, COLUMNS))  # type: ignore[arg-type]
    assert "== sweep ==" in describe_result(wide, COLUMNS)  # type: ignore[arg-type]


def test_the_summary_of_the_demo() -> None:
    timing = Timing(
        queue_ms=1234.5, prefill_ms=45.1, transfer_ms=13.1, first_token_ms=1300.2, decode_ms=999.0,
        prefill_worker="prefill-0", decode_worker="decode-1", cached_tokens=512, pages_moved=32,
    )  # fmt: skip
    result: Any = SimpleNamespace(
        timing=timing, usage=Usage(prompt_tokens=1200, completion_tokens=120, cached_tokens=512)
    )
    prompts = [*demo.PROMPTS, demo.FOLLOW_UP]
    with contextlib.redirect_stdout(Terminal()):
        text = demo._result_table(prompts, [result] * len(prompts))
    assert_fits(text)
    for name in ("question 2", "TTFT", "transfer", "ms/token", "prefill-0", "decode-1", "cached", "512"):
        assert name in text


def test_views_of_a_deployment() -> None:
    workers = [worker(number, 10**7 * number) for number in range(12)]
    for each in workers:
        each.member.worker_id += "-of-a-pool-with-a-name"
        each.detail = "waiting for a node with 8 GPUs that no other deployment holds, the third time"
    view = compute_rates(sample(0.0, *workers), sample(2.0, *workers))
    view.unread["http://10.0.0.1:8000/metrics"] = "http://10.0.0.1:8000/metrics does not answer; " * 3
    assert_fits(format_rates("m", view, [1.0] * 20, COLUMNS))
    finding = Finding("transfer", "prefill-0 to decode-0", Severity.PROBLEM, "moves nothing " * 9, "look at it " * 12)
    text = format_finding(finding, {"FAIL": "31"}, COLUMNS)
    assert_fits(text.replace("\x1b[31m", "").replace("\x1b[0m", ""))
    assert words(format_finding(finding, columns=COLUMNS)) == words(format_finding(finding))


def test_a_decision_among_workers_with_long_names() -> None:
    stages = ("queue", "prefill", "transfer", "decode_queue", "decode", "harm", "bonus", "total")
    score = {f"{stage}_ms": 1234.5 for stage in stages}
    score |= {"prefill": "prefill-long-name-0", "decode": "decode-long-name-0"}  # type: ignore[dict-item]
    score |= {"prefill_cached_tokens": 100_000, "decode_cached_tokens": 100_000}
    attempt = {"predicted": score, "considered": [score | {"total_ms": float(number)} for number in range(3)]}
    decision = {"policy": "kv-aware", "completions": [{"index": 0, "attempts": [attempt]}]}
    assert_fits(format_decision(decision, COLUMNS))


def test_tables_fold_titles_then_texts_then_drop_columns_then_become_lists() -> None:
    header = ("name", "tokens cached", "served by")
    rows = [["a", "123", "prefill-0 > decode-0"], ["b", "4", "prefill-1 > decode-1"]]
    assert format_table(header, rows, 36).splitlines()[:3] == [
        "      tokens",
        "name  cached  served by",
        "a        123  prefill-0 > decode-0",
    ]
    assert format_table(header, rows, 26).splitlines()[2:4] == ["a        123  prefill-0 >", "              decode-0"]
    assert format_table(header, rows, 18, optional=("tokens cached",)).splitlines()[0] == "name  served by"
    assert format_table(header, rows, 18).splitlines()[0].startswith("name")
    assert "tokens cached  123" in format_table(header, rows, 18)


def test_folded_texts_continue_below_their_beginning() -> None:
    assert wrap("one two three", 8) == "one two\n  three"
    assert wrap("  one two", 7) == "  one\n    two"
    assert wrap("one two three", None) == "one two three"
    assert name_rows([("a", "one two three"), ("long", "x")], 14) == "a     one two\n      three\nlong  x"
