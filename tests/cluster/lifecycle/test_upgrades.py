"""Tests rolling upgrades: the gate's verdicts, and deployments that are upgraded or rolled back under load."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.lifecycle.upgrade import gate_policy
from cluster.lifecycle.upgrade.gate_policy import GateDecision, RequestSample, UpgradeGate, judge_upgrade
from cluster.lifecycle.upgrade.rolling_upgrade import UpgradePlan, UpgradeStage
from cluster.pools.pool import WorkerState
from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from penstock.client.async_client import AsyncClient
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, InvalidInput
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams, WorkerEnd, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.cluster.lifecycle.test_flips import ENGINE, MAX_TOKENS, check, config, undisturbed
from tests.support.hosted import PROMPTS, SAMPLING, Hosted, Load, hosted
from tests.system.test_faults import MODEL

__all__ = ["undisturbed"]  # a fixture

GATE = UpgradeGate(window_s=10.0, min_requests=10, max_error_rate=0.01, max_slowdown=1.5)


def sample(ended: int, failed: int = 0, ttft_s: float = 0.1, itl_s: float = 0.02) -> RequestSample:
    return RequestSample(ended, failed, ended * ttft_s, ended * 100 * itl_s, ended * 100)


@pytest.mark.parametrize(
    ("old", "new", "elapsed_s", "decision", "reason"),
    [
        (sample(100), sample(50), 5.0, GateDecision.WAIT, "50 requests at new workers"),
        (sample(100), sample(50), 10.0, GateDecision.PASS, "50 requests at new workers"),
        (sample(100), sample(10), 10.0, GateDecision.PASS, "10 requests"),
        (sample(100), sample(5), 10.0, GateDecision.WAIT, "10 are required"),
        (sample(100), sample(5), 30.0, GateDecision.WAIT, "10 are required"),
        (sample(100), sample(5), 100.0, GateDecision.PASS, "5 requests"),
        (sample(100), sample(0), 30.0, GateDecision.FAIL, "hardly any requests"),
        (sample(3), sample(5), 30.0, GateDecision.PASS, "little traffic"),
        (sample(3), sample(5, 1), 30.0, GateDecision.WAIT, "10 are required"),
        (sample(3), sample(1, 1), 100.0, GateDecision.FAIL, "1 of 2 requests failed at new workers, 0 of 3"),
        (sample(3), sample(0), 30.0, GateDecision.WAIT, "10 are required"),
        (sample(3), sample(0), 100.0, GateDecision.FAIL, "no evidence: new workers served no request"),
        (sample(0), sample(0), 100.0, GateDecision.FAIL, "no evidence: new workers served no request"),
        (sample(0), sample(0, 2), 100.0, GateDecision.FAIL, "no evidence: new workers served no request"),
        (sample(100), sample(7, 3), 1.0, GateDecision.FAIL, "3 of 10 requests failed at new workers, 0 of 100"),
        (sample(100), sample(1, 1), 1.0, GateDecision.WAIT, "2 requests"),
        # Old workers fail as often, so the upgrade is not the cause.
        (sample(80, 20), sample(85, 15), 10.0, GateDecision.PASS, ""),
        (sample(100), sample(50, ttft_s=0.17), 10.0, GateDecision.FAIL, "a first token takes 170.0 ms at"),
        (sample(100), sample(50, itl_s=0.05), 10.0, GateDecision.FAIL, "a token takes 50.0 ms"),
        (sample(100, ttft_s=0.001), sample(50, ttft_s=0.009), 10.0, GateDecision.PASS, ""),  # noise of short times
        (
            sample(5),
            sample(50, ttft_s=9.0),
            10.0,
            GateDecision.PASS,
            "",
        ),  # too few requests at old workers for a comparison
    ],
)
def test_the_gate_judges_errors_and_latencies_against_old_workers(
    old: RequestSample, new: RequestSample, elapsed_s: float, decision: GateDecision, reason: str
) -> None:
    verdict = judge_upgrade(GATE, 0.1, old, new, elapsed_s)
    assert verdict.decision is decision, verdict
    assert reason in verdict.reason


def test_only_what_ended_since_an_upgrade_began_is_judged() -> None:
    before, now = RequestSample(7, 1, 2.0, 1.0, 30), RequestSample(10, 4, 5.0, 6.0, 70)
    assert now.since(before) == RequestSample(3, 3, 3.0, 5.0, 40)


def test_the_gate_opens_without_evidence_only_on_request() -> None:
    gate = replace(GATE, without_evidence=True)
    assert judge_upgrade(gate, 0.1, sample(0), sample(0), 29.0).decision is GateDecision.WAIT
    verdict = judge_upgrade(gate, 0.1, sample(3), sample(0), 30.0)
    assert (verdict.decision, verdict.reason.partition(":")[0]) == (GateDecision.PASS, "without evidence")
    # Traffic avoids new workers.
    assert judge_upgrade(gate, 0.1, sample(100), sample(0), 30.0).decision is GateDecision.FAIL
    assert judge_upgrade(gate, 0.1, sample(0), sample(0, 3), 30.0).decision is GateDecision.FAIL
    none_required = replace(GATE, min_requests=0)
    assert judge_upgrade(none_required, 0.1, sample(0), sample(0), 10.0).decision is GateDecision.WAIT


def test_absolute_limits_apply_however_slow_old_workers_are() -> None:
    gate = UpgradeGate(window_s=10.0, min_requests=10, ttft_s=0.2, itl_s=0.03)
    assert judge_upgrade(gate, 0.1, sample(100), sample(50, ttft_s=0.19), 10.0).decision is GateDecision.PASS
    assert "more than 200.0" in judge_upgrade(gate, 0.1, sample(100, ttft_s=0.3), sample(50, ttft_s=0.3), 10.0).reason
    assert "more than 30.0" in judge_upgrade(gate, 0.1, sample(100), sample(50, itl_s=0.04), 10.0).reason


def another_revision(folder: Path) -> Path:
    """Returns a copy of the model with the same weights but another revision: equal tokens, different page hashes."""
    copy = folder / "next"
    shutil.copytree(MODEL, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    return copy


QUICK = UpgradeGate(window_s=1.0, min_requests=2, max_slowdown=1000.0)


@pytest.fixture
def patient_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets gates wait for their number of requests, however long a slow machine takes to serve them."""
    monkeypatch.setattr(gate_policy, "_PATIENCE", 1000)
    monkeypatch.setattr(gate_policy, "_LAST", 1000)


@pytest.mark.usefixtures("patient_gate")
async def test_an_upgrade_replaces_every_worker_under_load(tmp_path: Path, undisturbed: list[list[int]]) -> None:
    model = another_revision(tmp_path)
    async with hosted(config(prefill=1, decode=2)) as deployment:
        async with Load(deployment.grpc, max_tokens=MAX_TOKENS) as load:
            await load.more(2)
            upgrade = await deployment.controller.upgrading.begin(UpgradePlan(str(model), QUICK, share=0.5))
            assert await deployment.controller.upgrading.begin(UpgradePlan(str(model), QUICK)) is upgrade
            with pytest.raises(InvalidInput, match="is in flight"):
                await deployment.controller.upgrading.begin(UpgradePlan(str(MODEL), QUICK))
            with pytest.raises(InvalidInput, match="cannot change during an upgrade"):
                deployment.controller.pool_service.scale("decode", 3)
            reports = [progress async for progress in upgrade.follow()]
            await load.more(2)
        check(load, undisturbed)
        ends = [event.what for event in deployment.controller.events.after(0)]
        assert (ends.count(WorkerEnd.UPGRADED), ends.count(WorkerState.LOST)) == (3, 0)
        assert list(dict.fromkeys(report.stage for report in reports)) == [
            UpgradeStage.STARTING,
            UpgradeStage.PROVING,
            UpgradeStage.ROLLING,
            UpgradeStage.DONE,
        ], reports[-1].detail
        assert await revisions(deployment) == [ModelConfig.from_folder(model).revision] * 3
        assert [deployment.controller.pool_service.replicas(role.value) for role in Role] == [1, 2]
        assert deployment.controller.status().model == Path(MODEL).name  # clients see one model name
    assert set(deployment.pinned) == {0}


@pytest.mark.usefixtures("patient_gate")
async def test_an_upgrade_to_the_same_revision_replaces_every_process_under_load(undisturbed: list[list[int]]) -> None:
    """Repeated prompts are cached at the old worker, so only the traffic share sends requests to the new one.

    The gate opens only once the new worker has served what it requires.
    """
    gate = UpgradeGate(window_s=1.0, min_requests=8, max_slowdown=1000.0)
    async with hosted(config(prefill=1, decode=1)) as deployment:
        async with Load(deployment.grpc, num_lanes=1, max_tokens=MAX_TOKENS) as load:
            await load.more(6)
            upgrade = await deployment.controller.upgrading.begin(UpgradePlan("", gate, share=1.0))
            reports = [progress async for progress in upgrade.follow()]
            await load.more(2)
        check(load, undisturbed)
        assert reports[-1].stage is UpgradeStage.DONE, reports[-1].detail
        assert set(deployment.members()) == {"decode-1", "prefill-1", "router-0"}
    assert set(deployment.pinned) == {0}


async def revisions(deployment: Hosted) -> list[str]:
    found = []
    for member in deployment.members().values():
        if member.role in list(Role):
            async with make_channel(member.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                found.append((await stub.Describe(worker_pb2.DescribeRequest(), timeout=120)).model_revision)
    return found


@pytest.mark.usefixtures("patient_gate")
async def test_worse_new_workers_are_rolled_back(tmp_path: Path, undisturbed: list[list[int]]) -> None:
    model = another_revision(tmp_path)
    async with hosted(config(prefill=1, decode=1)) as deployment:
        before = deployment.members()
        async with Load(deployment.grpc, max_tokens=MAX_TOKENS) as load, make_channel(deployment.admin) as channel:
            request = admin_pb2.UpgradeRequest(
                model=str(model), share=0.5, window_s=1.0, min_requests=2, ttft_s=60.0, itl_s=1e-9
            )
            reports = [report async for report in admin_pb2_grpc.AdminStub(channel).Upgrade(request, timeout=120)]
            await load.more(2)
        check(load, undisturbed)
        assert reports[-1].stage == "rolled back"
        assert "a token takes" in reports[-1].detail
        assert deployment.members() == before
        assert set(await revisions(deployment)) == {ModelConfig.from_folder(MODEL).revision}
        assert [deployment.controller.pool_service.replicas(role.value) for role in Role] == [1, 1]


async def test_an_impossible_upgrade_is_refused_and_one_that_does_not_start_is_rolled_back(tmp_path: Path) -> None:
    model = another_revision(tmp_path)
    async with hosted(config(prefill=0, decode=1)) as deployment:
        controller = deployment.controller
        with pytest.raises(CheckpointError):
            await controller.upgrading.begin(UpgradePlan(str(tmp_path / "nowhere"), QUICK))
        with pytest.raises(InvalidInput, match="no upgrade in flight"):
            controller.upgrading.abort()
        tokenizer = model / "tokenizer.json"
        whole = tokenizer.read_bytes()
        tokenizer.write_bytes(whole + b"\n")
        with pytest.raises(InvalidInput, match="whose tokenizer differs from that of the served model"):
            await controller.upgrading.begin(UpgradePlan(str(model), QUICK))
        tokenizer.write_bytes(whole)
        upgrade = await controller.upgrading.begin(UpgradePlan(str(model), QUICK))
        for path in model.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:100])
        reports = [progress async for progress in upgrade.follow()]
        assert reports[-1].stage is UpgradeStage.ROLLED_BACK
        assert "decode-1 was lost" in reports[-1].detail
        assert set(deployment.members()) == {"decode-0", "router-0"}


async def test_an_operator_can_abort_an_upgrade(tmp_path: Path) -> None:
    async with hosted(config(prefill=0, decode=1)) as deployment:
        upgrade = await deployment.controller.upgrading.begin(UpgradePlan("", UpgradeGate(window_s=60.0)))
        async for progress in upgrade.follow():
            if progress.stage is UpgradeStage.PROVING:
                deployment.controller.upgrading.abort()
        assert upgrade.progress.detail == "an operator aborted it"
        assert set(deployment.members()) == {"decode-0", "router-0"}


SHORT = 24


def other_weights(folder: Path) -> Path:
    """Returns a model of the same shape and tokenizer that samples other tokens."""
    copy = folder / "other"
    shutil.copytree(MODEL, copy)
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        generator = torch.Generator().manual_seed(7)
        for name in sorted(tensors):
            if tensors[name].dim() > 1:
                noise = torch.randn(tensors[name].shape, generator=generator)
                tensors[name] = (tensors[name].float() + 0.05 * noise).to(tensors[name].dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return copy


def cached_pages(deployment: Hosted) -> dict[str, set[bytes]]:
    """Returns the hashes of the pages in each worker's prefix cache."""
    cached = {}
    for name, worker in deployment.workers.items():
        assert worker.host.server.replica is not None
        cached[name] = set(worker.host.server.replica.engine.prefix_cache._chains.nodes)
    return cached


async def test_two_different_models_serve_side_by_side_and_share_no_page(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    """Each request gets the tokens of the revision that serves it; after the rollback, all get those of the old one."""
    model = other_weights(tmp_path)
    engine = Engine.load(EngineConfig.model_validate({"model": str(model), **ENGINE}))
    expected = {
        False: [tokens[:SHORT] for tokens in undisturbed],
        True: [
            generate(engine, prompt, SamplingParams(max_tokens=SHORT, seed=number, **SAMPLING))  # type: ignore[arg-type]
            for number, prompt in enumerate(PROMPTS)
        ],
    }
    assert all(old != new for old, new in zip(expected[False], expected[True], strict=True))
    async with hosted(config(prefill=1, decode=1)) as deployment, AsyncClient(deployment.grpc, timeout_s=60) as client:

        async def ask_all() -> list[bool]:
            """Returns for each prompt whether the new revision served it."""
            served = []
            for number, prompt in enumerate(PROMPTS):
                result = await client.complete(prompt, max_tokens=SHORT, seed=number, **SAMPLING)  # type: ignore[arg-type]
                assert result.timing is not None
                is_new = result.timing.decode_worker == "decode-1"
                assert result.timing.prefill_worker.endswith("-1" if is_new else "-0")
                assert list(result.token_ids) == expected[is_new][number]
                served.append(is_new)
            return served

        assert not any(await ask_all())
        upgrade = await deployment.controller.upgrading.begin(
            UpgradePlan(str(model), UpgradeGate(window_s=600.0), share=0.5)
        )
        async for progress in upgrade.follow():
            if progress.stage is UpgradeStage.PROVING:
                break
        async with asyncio.timeout(120):  # until each worker has cached at least one full page
            while not all((cached := cached_pages(deployment)).values()):
                await ask_all()
        old, new = (cached[f"decode-{n}"] | cached[f"prefill-{n}"] for n in range(2))
        assert old.isdisjoint(new)
        deployment.controller.upgrading.abort()
        async for progress in upgrade.follow():
            last = progress
        assert last.stage is UpgradeStage.ROLLED_BACK
        assert not any(await ask_all())
        assert set(deployment.members()) == {"decode-0", "prefill-0", "router-0"}
        staying = deployment.workers[WorkerId("decode-0")].host.server.replica
        assert staying is not None
        assert new.isdisjoint(staying.engine.prefix_cache._chains.nodes)  # the removed workers handed over no pages
    assert set(deployment.pinned) == {0}
