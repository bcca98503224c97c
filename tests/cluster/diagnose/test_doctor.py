"""Tests the findings of `penstock doctor` on given reports, and its transfers between real workers. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli.commands.inspecting.doctor import format_finding
from cluster.cli.main import main
from cluster.diagnose.deployment_checks import examine
from cluster.diagnose.findings import Finding, Severity, TransferProbe, WorkerCheckup, judge_transfers, judge_workers
from cluster.diagnose.local_checks import judge_gpu
from cluster.diagnose.pair_probe import schedule_pairs
from decode_worker.server import DecodeServer
from penstock.rpc.server import make_channel
from penstock.types import Epoch, Member, Role, WorkerId
from penstock.v1 import worker_pb2
from prefill_worker.server import PrefillServer
from tests.support.serving import worker_config

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
GIB = 1 << 30


def member(role: Role, number: int = 0) -> Member:
    return Member(
        WorkerId(f"{role.value}-{number}"), Epoch(number + 10 * (role is Role.DECODE)), role, f"host-{number}:1"
    )


def checkup(worker: Member, **changes: object) -> WorkerCheckup:
    described = {"model": "m", "model_revision": "r1", "page_size": 16, "kv_digest": "kv1", "transports": ["shm"]}
    reported = {"unix_time_s": 100.0, "host": "h", "torch": "2", "penstock": "0", "python": "3", "device": "cpu"}
    reported |= {"memory_free_bytes": GIB, "memory_total_bytes": 2 * GIB}
    fields = worker_pb2.WorkerDescription.DESCRIPTOR.fields_by_name
    for name, value in changes.items():
        (described if name in fields else reported)[name] = value  # type: ignore[assignment]
    return WorkerCheckup(
        worker,
        worker_pb2.WorkerDescription(**described),  # type: ignore[arg-type]
        worker_pb2.CheckupResponse(**reported),  # type: ignore[arg-type]
        99.9,
        100.1,
    )


def complaints(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    return [(each.check, each.subject, each.severity.value) for each in findings if each.severity is not Severity.OK]


def test_a_healthy_pool_has_no_findings() -> None:
    workers = [checkup(member(Role.PREFILL)), checkup(member(Role.DECODE)), checkup(member(Role.DECODE, 1))]
    assert complaints(judge_workers(workers)) == []
    assert {each.check for each in judge_workers(workers)} >= {"clock", "memory", "device", "model", "layout", "torch"}
    assert judge_workers([]) == []


@pytest.mark.parametrize(
    ("changes", "complaint", "words"),
    [
        ({"unix_time_s": 103.0}, ("clock", "decode-0", "warning"), ["+3000 ms", "chrony"]),
        ({"memory_free_bytes": 1}, ("memory", "decode-0", "problem"), ["kv_memory_bytes"]),
        ({"device_fault": "ECC error"}, ("device", "decode-0", "problem"), ["ECC error", "drain decode-0"]),
        ({"shm_free_bytes": 1 << 20}, ("/dev/shm", "decode-0", "warning"), ["1 MiB free", "--shm-size"]),
        ({"disk_path": "/cache"}, ("disk", "decode-0", "warning"), ["/cache", "engine.disk_bytes"]),
        ({"model_fault": "config.json is missing"}, ("model", "decode-0", "problem"), ["config.json", "successor"]),
        ({"kv_digest": "kv2"}, ("layout", "all workers", "warning"), ["prefill-0 (kv1) and decode-0 (kv2)", "upgrade"]),
        ({"torch": "3"}, ("torch", "all workers", "warning"), ["2 on prefill-0; 3 on decode-0", "the same"]),
        ({"transports": ["nixl"]}, ("transports", "prefill-0", "problem"), ["shm", "decode-0", "transfer.transport"]),
    ],
)
def test_each_problem_is_reported_with_its_fix(
    changes: dict[str, object], complaint: tuple[str, str, str], words: list[str]
) -> None:
    findings = judge_workers([checkup(member(Role.PREFILL)), checkup(member(Role.DECODE), **changes)])
    assert complaints(findings) == [complaint]
    (finding,) = [each for each in findings if each.severity is not Severity.OK]
    for word in words:
        assert word in format_finding(finding)


def test_a_clock_skew_within_the_calls_duration_is_not_reported() -> None:
    slow = checkup(member(Role.DECODE), unix_time_s=103.0)
    slow = WorkerCheckup(slow.member, slow.description, slow.report, 96.0, 104.0)
    assert complaints(judge_workers([slow])) == []


def test_different_page_sizes_are_not_a_problem() -> None:
    findings = judge_workers([checkup(member(Role.PREFILL), page_size=64), checkup(member(Role.DECODE))])
    assert complaints(findings) == []
    assert any("pages of 16, 64 tokens: KV is repacked" in each.text for each in findings)


def test_a_pair_slower_than_the_others_is_reported() -> None:
    source = member(Role.PREFILL)
    times = [0.01, 0.01, 0.012, 0.1]
    pairs = [TransferProbe(source, member(Role.DECODE, number), 1 << 20, each) for number, each in enumerate(times)]
    failed = TransferProbe(source, member(Role.DECODE, 9), fault="connection refused")
    findings = judge_transfers([*pairs, failed])
    assert complaints(findings) == [
        ("transfer", "prefill-0 > decode-3", "warning"),
        ("transfer", "prefill-0 > decode-9", "problem"),
    ]
    assert "10 MiB/s" in findings[3].text
    assert complaints(judge_transfers(pairs[2:])) == []  # two pairs do not establish a usual speed
    brief = [replace(each, transfer_s=each.transfer_s / 10) for each in pairs]
    assert complaints(judge_transfers(brief)) == []  # transfers of milliseconds do not show the speed of a link


def test_every_pair_is_probed_once_and_each_worker_serves_one_probe_at_a_time() -> None:
    for num_prefill, num_decode in ((2, 3), (3, 2), (1, 1), (0, 3), (2, 0), (4, 4)):
        members = [member(Role.PREFILL, each) for each in range(num_prefill)]
        members += [member(Role.DECODE, each) for each in range(num_decode)]
        ways = [way for pairs in schedule_pairs(members) for way in pairs]
        assert len(ways) == len(set(ways)) == num_prefill * num_decode + num_decode * max(0, num_decode - 1)
        for pairs in schedule_pairs(members):
            busy = [each for way in pairs for each in way]
            assert len(busy) == len(set(busy)) > 0


def test_a_gpu_with_memory_errors_is_a_problem() -> None:
    assert judge_gpu(0, ["H100", "10", "80", "40", "0"]).severity is Severity.OK
    assert judge_gpu(0, ["L4", "10", "24", "40", "[N/A]"]).severity is Severity.OK
    assert judge_gpu(1, ["H100", "10", "80", "40", "3"]).severity is Severity.PROBLEM


@contextlib.asynccontextmanager
async def workers() -> AsyncIterator[list[Member]]:
    prefill = PrefillServer(worker_config(Role.PREFILL, MODEL, "prefill-0"))
    decodes = [DecodeServer(worker_config(Role.DECODE, MODEL, f"decode-{number}")) for number in range(2)]
    servers = [prefill, *decodes]
    try:
        for server in servers:
            await server.start()
        names = ["prefill-0", "decode-0", "decode-1"]
        yield [
            Member(WorkerId(name), server.epoch, server.role, server.address)
            for name, server in zip(names, servers, strict=True)
        ]
    finally:
        for server in servers:
            await server.stop()


async def test_pages_move_between_every_pair_and_a_dead_worker_is_reported() -> None:
    async with workers() as members:
        findings = [each async for each in examine(members, make_channel, transfers=True)]
        assert complaints([each for each in findings if each.check not in ("/dev/shm", "memory")]) == []
        ways = [each for each in findings if each.check == "transfer"]
        assert sorted(each.subject for each in ways) == [
            "decode-0 > decode-1",
            "decode-1 > decode-0",
            "prefill-0 > decode-0",
            "prefill-0 > decode-1",
        ]
        assert all("MiB" in each.text for each in ways)
        nobody = Member(WorkerId("decode-2"), Epoch(5), Role.DECODE, "127.0.0.1:1")
        findings = [each async for each in examine([members[1], nobody], make_channel, transfers=False)]
        assert ("answers", "decode-2", "problem") in complaints(findings)


async def test_without_a_deployment_the_machine_and_the_model_are_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def doctor(*flags: str) -> tuple[int, dict[str, object]]:
        status = await asyncio.to_thread(main, ["doctor", "--json", "--admin", "127.0.0.1:1", *flags])
        return status, json.loads(capsys.readouterr().out)

    status, report = await doctor("--model", str(MODEL))
    found = {(each["check"], each["verdict"]) for each in report["findings"]}  # type: ignore[attr-defined]
    assert {("ray", "ok"), ("model", "ok"), ("deployment", "skipped")} <= found
    assert status == (1 if report["problems"] else 0)
    status, report = await doctor("--model", str(tmp_path))
    assert status == 1
    faults = [each for each in report["findings"] if each["verdict"] == "problem"]  # type: ignore[attr-defined]
    assert any("config.json" in each["text"] for each in faults)
