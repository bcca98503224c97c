"""Tests the commands that measure traffic and plan deployments."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cluster.cli.main import main


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


def test_traffic_prints_what_a_trace_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_traffic_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no file" in refusal(capsys, "traffic", str(tmp_path / "none.jsonl"))
    trace = write_trace(tmp_path / "t.jsonl", 1)
    assert "--limit: is 0; give at least 1" in refusal(capsys, "traffic", str(trace), "--limit", "0")
    assert "needs reused blocks" in refusal(capsys, "traffic", str(trace), "--svg", str(tmp_path / "x.svg"))
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1}\n')
    assert "bad.jsonl:1" in refusal(capsys, "traffic", str(tmp_path / "bad.jsonl"))
