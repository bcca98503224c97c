"""Tests `penstock trace` against a router over fake workers, and what it prints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from cluster.cli.commands.inspecting.trace import format_waterfall
from cluster.cli.main import main
from cluster.cli.router_http import router_urls
from penstock.v1 import admin_pb2
from tests.support.router.router_fakes import FakeWorker, running_router, until

STAGES = ["tokenize", "admission", "placement", "queue", "prefill", "decode"]


async def generate(url: str, num_completions: int = 1) -> str:
    """Returns the id of a request that has ended."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": "once", "max_tokens": 4, "n": num_completions}
        return str((await http.post("/v1/completions", json=body)).json()["id"])


async def test_the_waterfall_names_each_stage_and_the_decision(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no line is folded, however long a stage takes
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        request_id = await generate(router.http_url, 2)
        assert await asyncio.to_thread(main, ["trace", request_id, "--router", router.http_url]) == 0
        text = capsys.readouterr().out
        assert await asyncio.to_thread(main, ["trace", request_id, "--router", router.http_url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert [completion["index"] for completion in found["completions"]] == [0, 1]
    for completion in found["completions"]:
        assert [stage["name"] for stage in completion["stages"]] == STAGES
        assert completion["stages"][-1]["worker"] == "decode-0"
        assert completion["end_ms"] == pytest.approx(completion["stages"][-1]["end_ms"])
    assert found["decision"]["policy"] == "kv-aware"
    assert f"{request_id} [1]: " in text
    assert [line.split()[0] for line in text.splitlines()[2:9]] == ["stage", *STAGES]
    assert "policy kv-aware" in text


async def test_a_running_request_shows_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by its x-request-id and by the id that its answer will have, while it runs and afterwards."""
    monkeypatch.setenv("COLUMNS", "200")
    worker = await FakeWorker(pause_at=2).start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        waterfall = router.server._live.waterfall
        body, headers = {"prompt": "a", "max_tokens": 4}, {"x-request-id": "mine"}
        call = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        await until(lambda: bool(found := waterfall("mine")) and found["completions"][0]["output_tokens"] == 2)
        assert await asyncio.to_thread(main, ["trace", "mine", "--router", router.http_url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        stages = found["completions"][0]["stages"]
        assert [stage["name"] for stage in stages] == [*STAGES[:3], "until first token", "decode"]
        assert [stage["worker"] for stage in stages] == ["", "", "", "decode-0", "decode-0"]
        request_id = found["request_id"]
        assert await asyncio.to_thread(main, ["trace", request_id, "--router", router.http_url]) == 0
        text = capsys.readouterr().out
        assert f"{request_id}: still running after " in text
        assert "2 tokens so far, standard lane" in text
        worker.resume.set()
        answer = await call
        assert (answer.json()["id"], answer.headers["x-request-id"]) == (request_id, "mine")
    ended = waterfall("mine")
    assert ended is not None
    assert "running" not in ended
    assert (ended["request_id"], ended["completions"][0]["finish_reason"]) == (request_id, "length")
    assert waterfall(request_id) == ended


async def test_an_unknown_request_gets_an_error_about_what_a_router_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_router(await FakeWorker().start()) as router:
        assert await asyncio.to_thread(main, ["trace", "a b/c?", "--router", router.http_url]) == 2
    assert (
        f"'a b/c?' neither runs at {router.http_url} nor is among the last completions there" in capsys.readouterr().err
    )


async def test_with_tenants_the_metrics_token_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("a-token")
    token.chmod(0o600)
    settings = {"tenants": {"one": {"keys": []}}, "metrics_token_file": str(token)}
    async with running_router(await FakeWorker().start(), **settings) as router:
        command = ["trace", "x", "--router", router.http_url]
        assert await asyncio.to_thread(main, command) == 2
        assert (
            "refuses the call; name the file of its metrics token with --metrics-token-file" in capsys.readouterr().err
        )
        assert await asyncio.to_thread(main, [*command, "--metrics-token-file", str(token)]) == 2
        assert "nor is among the last completions" in capsys.readouterr().err


def test_a_single_router_is_reached_at_its_public_port() -> None:
    public = ["grpc://h:1", "http://h:2"]
    assert router_urls(admin_pb2.StatusResponse(endpoints=public)) == ["http://h:2"]
    own = [*public, "http://h:3/metrics", "http://h:4/metrics"]
    assert router_urls(admin_pb2.StatusResponse(endpoints=own)) == ["http://h:3", "http://h:4"]
    assert router_urls(admin_pb2.StatusResponse()) == []


def test_an_unreachable_router_is_reported_by_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "x", "--router", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/ui/requests/x does not answer: nothing listens there" in capsys.readouterr().err


def test_bars_share_one_scale_and_lost_workers_are_marked() -> None:
    stage = {"name": "prefill", "start_ms": 50.0, "end_ms": 100.0, "worker": "prefill-0"}
    completion = {
        "index": 0,
        "end_ms": 100.0,
        "first_token_ms": 100.0,
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "output_tokens": 1,
        "finish_reason": "length",
        "lane": "bulk",
        "pages_moved": 3,
        "preemptions": 0,
        "migrations": 0,
        "redispatches": 1,
        "stages": [stage],
        "preempted_ms": [60.0],
        "legs": [
            {"worker": "decode-0", "cause": "placed", "sent_ms": 1.0, "lost_ms": 7.0, "error": "UNAVAILABLE"},
            {"worker": "decode-1", "cause": "re-dispatched", "sent_ms": 8.0},
        ],
    }
    decision = {"policy": "random", "completions": []}
    found = {"request_id": "r", "trace_id": "t" * 32, "completions": [completion], "decision": decision}
    lines = format_waterfall(found, 56, "#").splitlines()
    assert lines[:12] == [
        f"trace {'t' * 32}",
        "",
        "r: 100.0 ms, first token after 100.0 ms",
        "9 prompt tokens, 0 cached, 1 tokens, length, bulk lane,",
        "  pages moved: 3, re-dispatches: 1",
        "stage    start ms    ms  at",
        "prefill      50.0  50.0  prefill-0" + " " * 12 + "#" * 10,  # the second half of the remaining 20 columns
        "",
        "decode-0: placed at 1.0 ms, lost at 7.0 ms (UNAVAILABLE)",
        "decode-1: re-dispatched at 8.0 ms",
        "",
        "preempted at 60.0 ms",
    ]
