"""Tests which mistakes `penstock bench` refuses, and how its flags describe a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli.commands.sizing.bench import sweep_spec, write_files
from cluster.cli.main import main, make_parser
from penstock.bench.measure import SweepSpec
from penstock.bench.workloads.schedule import Arrivals
from penstock.types import Lane
from tests.penstock.bench.made_runs import steady_result


def spec_of(*flags: str) -> SweepSpec:
    return sweep_spec(make_parser("bench").parse_args(["bench", "run", *flags]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "x"], "--rate: is 'x'; give numbers"),
        (["--rate", "1", "--concurrency", "2"], "load: --rate and --concurrency are given; give one"),
        (["--trace", "a", "--mix", "chat"], "workload: --trace and --mix are given; give one"),
        (["--speed", "2"], "--speed: needs --trace"),
        (["--requests", "0"], "--requests: is 0; give at least 1"),
        (["--duration", "5"], "--duration: is 5; give seconds above 0, and --rate with it"),
        (["--slo", "ttft"], "slo: 'ttft' has 'ttft'"),
        (["--cancel", "2"], "--cancel: is '2'; give a share from 0 to 1"),
        (["--lanes", "urgent=1"], "--lanes: has 'urgent=1'; give LANE=SHARE of interactive"),
        (["--token-ids", "5"], "--token-ids: is '5'; give FROM:TO"),
        (["--body", "[1]"], "--body: is '[1]'; give a JSON object"),
        (["--trace", "gone.jsonl"], "trace: no file gone.jsonl"),
        (["--url", "127.0.0.1:1"], "127.0.0.1:1/v1/models does not answer: nothing listens there"),
    ],
)
def test_mistakes_are_refused_by_flag(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_flags_describe_the_sweep() -> None:
    spec = spec_of(
        "--mix", "chat=2,bulk", "--rate", "1,4", "--burstiness", "2", "--duration", "30", "--lanes", "bulk=1"
    )
    assert spec.points == [Arrivals(rate=1.0, cv=2.0), Arrivals(rate=4.0, cv=2.0)]
    assert (len(spec.source.drafts), spec.max_requests_s) == (120, 30.0)
    assert spec.extras.lanes == {Lane.BULK: 1.0}
    assert spec_of().points == [Arrivals(concurrency=8)]
    assert spec_of("--cancel", "0.1:20").extras.cancel_after == 20


def test_a_trace_is_replayed_at_its_own_times_by_default(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f'{{"timestamp":{1000 * n},"input_length":64,"output_length":8}}\n' for n in range(5)))
    spec = spec_of("--trace", str(file), "--requests", "3", "--scale", "0.5")
    assert spec.points == [Arrivals(speed=1.0)]
    assert [draft.num_output_tokens for draft in spec.source.drafts] == [4, 4, 4]
    assert [point.rate for point in spec_of("--trace", str(file), "--rate", "3").points] == [3.0]


def test_results_are_written_reported_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, itl_s in (("a", 0.02), ("b", 0.03)):
        write_files(steady_result(0.2, itl_s, 1, count=60), tmp_path / name)
        assert {path.name for path in (tmp_path / name).iterdir()} == {"result.json", "requests.csv", "report.html"}
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b" / "result.json")]) == 0
    printed = capsys.readouterr().out
    assert "== 10 requests/s: 60 and 60 requests, the same requests in both ==" in printed
    assert [line.split()[-1] for line in printed.splitlines() if line.startswith("ITL p50")] == ["worse"]
    assert main(["bench", "compare", "--json", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    assert {each["verdict"] for each in point["ratios"]} == {"no difference shown"}
    assert main(["bench", "report", "--json", str(tmp_path / "a")]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["figures"]["endings"] == {"complete": 60}
    assert "requests" not in point
    (tmp_path / "a" / "report.html").unlink()
    assert main(["bench", "report", str(tmp_path / "a")]) == 0
    assert "SLO ttft=1,tpot=0.1: 60 of 60 met it" in capsys.readouterr().out
    assert (tmp_path / "a" / "report.html").exists()
    assert main(["bench", "report", str(tmp_path / "gone")]) == 2
    assert "give the folder that `penstock bench run` wrote" in capsys.readouterr().err
