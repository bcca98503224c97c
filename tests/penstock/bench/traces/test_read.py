"""Tests the readers of trace files: formats, ticks, runs that cover a prompt, and errors that give the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from penstock.bench.traces.read import FOLDER_VARIABLE, read_trace
from penstock.bench.traces.record import FIRST_UNSHARED
from penstock.errors import InvalidInput
from penstock.types import Lane


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def rows(*found: dict[str, object]) -> str:
    return "".join(json.dumps(each) + "\n" for each in found)


def row(timestamp: float, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": 700, "output_length": 5, **more}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_hash_ids_become_runs_that_cover_the_prompt(tmp_path: Path, name: str) -> None:
    text = rows(row(1000, hash_ids=[7, 8]), row(1010, hash_ids=[7]), row(1020, hash_ids=[1, 2, 3]), row(1030))
    trace = read_trace(write(tmp_path / name, text))
    whole, short, long, unknown = trace.records
    assert trace.has_blocks
    assert [record.arrival_s for record in trace.records] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert whole.block_runs == ((7, 2),)
    assert whole.block_tokens == 512
    assert list(short.block_ids()) == [7, FIRST_UNSHARED]
    assert list(long.block_ids()) == [1, 2]  # two blocks of 512 hold the prompt
    assert list(unknown.block_ids()) == [FIRST_UNSHARED + 1]
    assert unknown.block_tokens == 700


def test_sessions_of_agents_have_runs_and_follow_each_other(tmp_path: Path) -> None:
    text = rows(row(0, session=3, agent="main", hash_runs=[[5, 2], [40, 8]], tenant="blue", lane="bulk"))
    trace = read_trace(write(tmp_path / "agents.jsonl", text))
    (record,) = trace.records
    assert trace.has_sessions
    assert (record.session, record.agent, record.tenant, record.lane) == ("3", "main", "blue", Lane.BULK)
    assert record.block_tokens == 64
    assert list(record.block_ids()) == [5, 6, *range(40, 48), FIRST_UNSHARED]  # 11 blocks of 64 hold 700 tokens


def test_requests_of_a_tick_are_spread_over_it_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "ticks.jsonl", rows(*(row(3000 * (number // 10)) for number in range(100))))
    first, second = read_trace(path, seed=1), read_trace(path, seed=2)
    times = [record.arrival_s for record in first.records]
    assert first.tick_s == 3.0
    assert len(set(times)) == 100
    assert times == sorted(times)
    assert first == read_trace(path, seed=1)
    assert times != [record.arrival_s for record in second.records]


def test_azure_csv_has_dates_and_burstgpt_seconds(tmp_path: Path) -> None:
    azure = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
    burst = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,GPT-4,472,18,490,Conversation log
"""
    first, second = read_trace(write(tmp_path / "azure.csv", azure)).records
    assert (first.num_input_tokens, first.num_output_tokens) == (374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    (only,) = read_trace(write(tmp_path / "burst.csv.gz", burst)).records
    assert (only.num_input_tokens, only.num_output_tokens) == (472, 18)


def test_a_trace_is_found_in_the_configured_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "here.jsonl", rows(row(0)))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert len(read_trace("here.jsonl").records) == 1
    with pytest.raises(InvalidInput, match=r"no file gone\.jsonl, here or in PENSTOCK_TRACES"):
        read_trace("gone.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.jsonl", rows(row(0), {"timestamp": 1}), r"bad\.jsonl:2: KeyError\('input_length'\); expected numbers"),
        ("bad.jsonl", rows(row(0, input_length=-1)), r"bad\.jsonl:1: ValueError\('a length is -1'\)"),
        ("bad.jsonl", rows(row(0, hash_ids=[1 << 30])), r"a block id is outside 0 to"),
        ("bad.jsonl", "[1]\n", r"bad\.jsonl:1: AttributeError"),
        ("bad.jsonl", "\n", "has no requests"),
        ("bad.csv", "a,b\n1,2\n", r"no column timestamp; its header is a,b"),
        ("bad.csv", "timestamp,input_length,output_length\n1,x,2\n", r"bad\.csv:2: ValueError"),
    ],
)
def test_a_malformed_line_is_refused_by_number(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_trace(write(tmp_path / name, text))
