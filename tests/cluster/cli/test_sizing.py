"""Tests the commands that measure traffic and plan deployments."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cluster.cli.main import main
from penstock.config import ServeConfig, load
from penstock.types import Role


def write_trace(path: Path, num_requests: int = 40) -> Path:
    """Writes four conversations whose turns extend each other by a block."""
    rows = [
        {
            "timestamp": 500 * number,
            "input_length": 512 * (1 + number // 4),
            "output_length": 20 + number,
            "hash_ids": [100 * (number % 4) + block for block in range(1 + number // 4)],
        }
        for number in range(num_requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_traffic_prints_the_statistics_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t.jsonl")
    assert main(["traffic", str(trace), "--kv-bytes", "131072"]) == 0
    text = capsys.readouterr().out
    assert "40 requests" in text
    assert "one unlimited cache hits 81.8%" in text
    assert "GiB hold every prompt" in text
    assert "4, inferred from shared blocks" in text


def test_traffic_writes_json_and_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t.jsonl")
    page, image = tmp_path / "t.html", tmp_path / "t.svg"
    assert main(["traffic", str(trace), "--json", "--html", str(page), "--svg", str(image)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["num_requests"] == 40
    assert data["reuse"]["curve"][-1]["hit_rate"] == pytest.approx(data["reuse"]["ceiling"])
    assert ElementTree.fromstring(image.read_text()).tag.endswith("svg")
    assert "<svg" in page.read_text()


def test_traffic_refuses_unreadable_traces_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no file" in refusal(capsys, "traffic", str(tmp_path / "none.jsonl"))
    trace = write_trace(tmp_path / "t.jsonl", 1)
    assert "--limit: is 0; give at least 1" in refusal(capsys, "traffic", str(trace), "--limit", "0")
    assert "needs reused blocks" in refusal(capsys, "traffic", str(trace), "--svg", str(tmp_path / "x.svg"))
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1}\n')
    assert "bad.jsonl:1" in refusal(capsys, "traffic", str(tmp_path / "bad.jsonl"))


PLAN = ["plan", "--model", "llama-3.1-8b", "--accelerator", "H100=2.5", "--ttft", "1", "--verify", "0"]
STATISTICS = ["--rate", "5", "--input-tokens", "800", "--output-tokens", "60"]


@pytest.mark.parametrize("rate", ["2", "200"])
def test_plan_writes_settings_that_serve_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: str) -> None:
    file, page = tmp_path / "serve.toml", tmp_path / "plan.html"
    trace = write_trace(tmp_path / "t.jsonl")
    assert (
        main([*PLAN, str(trace), "--rate", rate, "--write", str(file), "--html", str(page), "--kv-dtype", "fp8"]) == 0
    )
    text = capsys.readouterr().out
    assert "Choice: " in text
    assert "nothing was measured" in text
    config = load(ServeConfig, str(file))
    assert config.engine_config(Role.DECODE).kv_dtype == "fp8"
    assert config.decode_pool.replicas >= 1
    assert config.autoscaler.slo.ttft_s == 1.0
    assert page.read_text().count("<svg") == 3


def test_plan_of_statistics_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *STATISTICS, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"]["num_devices"] >= 1
    assert data["expected"]["attainment"] >= 0.95
    assert not data["is_verified"]
    assert {"KV", "prompts", "decoding", "pages", "pools"} == set(data["reasons"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (STATISTICS[:4], "--output-tokens: is missing; give it, or a TRACE"),
        ([*STATISTICS, "--accelerator", "H100"], "give NAME=PRICE"),
        ([*STATISTICS, "--accelerator", "H1000=3"], "'H1000' is not known"),
        ([*STATISTICS, "--tensor-parallel", "two"], "--tensor-parallel: is 'two'"),
        ([*STATISTICS, "--attainment", "1.5"], "attainment: is 1.5; give a share between 0 and 1"),
        ([*STATISTICS, "--ttft", "0.0001"], "even on an idle worker"),
    ],
)
def test_plan_refuses_mistakes_by_flag(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in refusal(capsys, *PLAN, *flags)
