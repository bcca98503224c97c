"""Tests that the table of docs/security.md is true, how costs and growth are judged, and some real attacks.

`make attack` runs them all against a deployment; here some short ones run against a router of this process.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.attack import http2_frames
from benchmarks.attack.attacks import connections
from benchmarks.attack.growth import find_growth
from benchmarks.attack.sockets import Http2
from benchmarks.attack.table import ATTACKS, ROOMS, describe
from benchmarks.attack.target import AttackTarget, Credentials
from benchmarks.attack.verdict import (
    MIB,
    AttackOutcome,
    Bounds,
    Breach,
    Memory,
    StreamGaps,
    Window,
    WindowSums,
    are_withstood,
)
from penstock.rpc.secret import ClusterSecret, digest_of
from penstock.v1 import admin_pb2
from tests.support.router.router_fakes import FakeWorker, running_router

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (held|by Ray|\*\*red\*\*: .+?) \| `([\w/.]+)` \| (`[\w/.:]+`|none) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
HERE = (
    "framing_lies", "bad_utf8", "oversized_headers", "path_tricks", "models_without_a_key", "garbage_bytes",
    "metrics_without_a_token", "http2_settings_flood", "http2_stream_flood", "http2_rapid_reset",
    "calls_that_never_ask",
)  # fmt: skip


def test_the_page_has_each_attack_once_in_the_order_of_the_harness() -> None:
    listed = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|$", PAGE.split("## Attacks")[1].split("\n## ")[0], re.MULTILINE)
    assert listed == list(ATTACKS)
    assert [row[0] for row in ROWS] == listed, "a row is not of the form: attack, verdict, file, test"


@pytest.mark.parametrize(("name", "verdict", "held_in", "test"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_a_file_and_a_test_that_exist(name: str, verdict: str, held_in: str, test: str) -> None:
    assert (ROOT / held_in).is_file()
    if verdict != "held" and test == "none":
        return  # a known weakness, or another project's responsibility
    file, _, function = test.strip("`").partition("::")
    found = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in found, f"{name}: {file} has no {function}"
    assert function.startswith("test_")
    assert function != test_a_router_withstands_attacks_that_need_no_deployment.__name__ or name in HERE


def test_each_attack_is_one_described_function_of_the_target() -> None:
    assert sum(len(room.ATTACKS) for room in ROOMS) == len(ATTACKS)
    for name, attack in ATTACKS.items():
        assert inspect.iscoroutinefunction(attack), name
        assert list(inspect.signature(attack).parameters) == ["target"], name
        assert describe(attack).endswith("."), name


WINDOW = Window(pause_s=0.01, itl_s=0.004, worst_gap_s=0.02, num_tokens=500, num_probes=200)
CALM = AttackOutcome("calm", 1.0, WINDOW, WINDOW, Memory(200 * MIB, 210 * MIB, 205 * MIB))


def test_an_attack_that_costs_nothing_is_withstood() -> None:
    assert CALM.faults(Bounds()) == []
    assert are_withstood([CALM], Bounds())


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"breach": "answered INTERNAL"}, "answered INTERNAL"),
        ({"replaced": ("router-0",)}, "ended: router-0"),
        ({"during": replace(WINDOW, failures=("stream: Unavailable: x",))}, "1 requests of others failed"),
        ({"during": replace(WINDOW, num_tokens=0)}, "got no token"),
        ({"during": replace(WINDOW, itl_s=0.009)}, "ITL during it 2.2 times as long"),
        ({"during": replace(WINDOW, pause_s=0.3)}, "router silent for 0.30 s"),
        ({"memory": Memory(200 * MIB, 700 * MIB, 205 * MIB)}, "memory grew by 500 MiB"),
        ({"memory": Memory(200 * MIB, 350 * MIB, 340 * MIB)}, "kept 140 MiB"),
    ],
)
def test_each_cost_is_reported_by_name(change: dict[str, object], fault: str) -> None:
    (found,) = replace(CALM, **change).faults(Bounds())  # type: ignore[arg-type]
    assert fault in found
    assert not are_withstood([CALM, replace(CALM, **change)], Bounds())  # type: ignore[arg-type]


def test_an_already_slow_machine_is_not_blamed_on_the_attack() -> None:
    slow = replace(WINDOW, pause_s=0.4)
    assert replace(CALM, before=slow, during=replace(slow, pause_s=0.7)).faults(Bounds()) == []


def test_slowness_that_an_idle_server_shows_too_is_not_the_attacks() -> None:
    paused = replace(WINDOW, pause_s=0.7, idle_pause_s=0.4)
    assert replace(CALM, during=paused).faults(Bounds()) == []
    assert replace(CALM, during=replace(paused, idle_pause_s=0.3)).faults(Bounds()) == ["router silent for 0.70 s"]


def test_streams_may_slow_down_by_the_cores_that_other_work_takes() -> None:
    slow = replace(CALM, during=replace(WINDOW, itl_s=0.012), cores_before=2.0)
    assert replace(slow, cores_during=1.0).faults(Bounds()) == []
    assert replace(slow, cores_during=2.0).faults(Bounds()) == [
        "ITL during it 3.0 times as long (2.0 cores before, 2.0 during it)"
    ]
    assert len(replace(slow, cores_before=0.5, cores_during=2.0).faults(Bounds())) == 1  # more cores excuse nothing


def test_streams_may_be_as_slow_as_beside_ordinary_load_of_the_same_size() -> None:
    slow = replace(CALM, during=replace(WINDOW, itl_s=0.012))
    assert replace(slow, ordinary=replace(WINDOW, itl_s=0.010)).faults(Bounds()) == []
    (fault,) = replace(slow, ordinary=replace(WINDOW, itl_s=0.009)).faults(Bounds())
    assert "ITL during it 3.0 times" in fault


def test_a_stalled_stream_counts_up_to_now() -> None:
    gaps = StreamGaps()
    sums = WindowSums([gaps])
    gaps.on_tokens(1, 10.0)
    gaps.on_tokens(2, 10.5)
    window = sums.close(12.5)
    assert (window.num_tokens, window.worst_gap_s) == (2, 2.0)
    assert window.itl_s == pytest.approx(1.25)
    gaps.on_tokens(1, 13.0)
    assert sums.close(13.0).itl_s == pytest.approx(0.5)
    gaps.on_end()  # the time to the next answer's first token is no gap
    gaps.on_tokens(1, 20.0)
    assert sums.close(20.0).num_tokens == 0


def readings(**values: float) -> dict[str, float]:
    return {name.replace("__", "-").replace("_", " "): value for name, value in values.items()}


def test_steady_growth_is_growth_and_a_peak_that_falls_is_not() -> None:
    quiet = [
        readings(router__0_files=files, router__0_memory=memory * MIB)
        for files, memory in ((10, 100), (40, 400), (60, 410), (80, 380))
    ]
    assert find_growth(quiet) == ["router-0 files: grew from 40 to 80"]
    assert find_growth([*quiet, readings(router__0_files=41, router__0_memory=390 * MIB)]) == []


def test_figures_that_must_be_zero_are_compared_with_zero() -> None:
    quiet = [readings(decode__0_pages=0), readings(decode__0_pages=3), readings(decode__0_pages=0)]
    assert find_growth(quiet) == ["decode-0 pages: 0, 3, 0 in quiet moments, expected 0"]
    assert find_growth([readings(decode__0_pages=0)] * 3) == []


def test_frames_follow_the_specification() -> None:
    head = http2_frames.frame(http2_frames.PING, http2_frames.ACK, 5, b"penstock")
    assert head[:9] == b"\0\0\x08\x06\x01\0\0\0\x05"
    assert http2_frames.parse_head(head[:9]) == (8, http2_frames.PING, http2_frames.ACK, 5)
    assert http2_frames.header_block([("a", "b" * 200)])[:7] == b"\0\x01a\x7f\x49bb"


class _RouterAlone(AttackTarget):
    async def status(self) -> admin_pb2.StatusResponse:
        return admin_pb2.StatusResponse(ready=True)


@pytest.fixture(name="target")
async def _target(tmp_path: Path) -> AsyncIterator[AttackTarget]:
    """Yields a router of this process over a worker of this process, as a target without a deployment."""
    credentials = Credentials("v" * 40, "a" * 40, "m" * 40, ClusterSecret.make())
    token = tmp_path / "metrics"
    token.touch(mode=0o600)
    token.write_text(credentials.metrics_token)
    keys = {"victim": credentials.victim_key, "attacker": credentials.attacker_key}
    tenants = {name: {"keys": [digest_of(key)]} for name, key in keys.items()}
    worker = await FakeWorker().start()
    async with running_router(worker, tenants=tenants, metrics_token_file=str(token)) as router:
        ports = router.server.ports
        addresses = {"grpc": f"127.0.0.1:{ports.grpc}", "http": f"127.0.0.1:{ports.http}", "admin": ""}
        yield _RouterAlone(None, addresses, credentials)


@pytest.fixture
def short_floods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_FLOOD_S", 0.3)


@pytest.mark.usefixtures("short_floods")
async def test_a_router_withstands_attacks_that_need_no_deployment(target: AttackTarget) -> None:
    for name in HERE:
        await ATTACKS[name](target)
        assert "penstock:saturation" in await target.metrics(), f"the router does not answer after {name}"


async def test_a_breach_is_detected(target: AttackTarget) -> None:
    target.key = target.credentials.metrics_token
    with pytest.raises(Breach, match="metrics were answered 200"):
        await ATTACKS["metrics_without_a_token"](target)


async def test_a_handwritten_call_is_answered(target: AttackTarget) -> None:
    """This shows that the frames reach a handler: attacks that the server only disconnects would prove nothing."""
    made = await Http2.open(target.grpc)
    headers = http2_frames.grpc_headers("/penstock.v1.Inference/ListModels", target.grpc, target.key)
    assert await made.send(http2_frames.open_call(1, headers, b""))
    async with asyncio.timeout(60):
        while made.counts.get(http2_frames.HEADERS, 0) < 2:  # noqa: ASYNC110  of the answer and of its end
            await asyncio.sleep(0.01)
    assert made.counts[http2_frames.DATA] == 1
    await made.close()
