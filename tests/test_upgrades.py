"""Rolling upgrades: what the gate says, and deployments that change their model under load, or change it back."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.promotion import Decision, Gate, Sample, judge
from cluster.upgrade import Plan, UpgradeStage
from engine.engine import Engine
from engine.generate import generate
from engine.model_config import ModelConfig
from penstock.async_client import AsyncClient
from penstock.config import EngineConfig
from penstock.errors import CheckpointError, InvalidInput
from penstock.grpc_server import make_channel
from penstock.types import Role, SamplingParams, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.hosted import PROMPTS, SAMPLING, Hosted, Load, hosted
from tests.test_faults import MODEL
from tests.test_flips import ENGINE, MAX_TOKENS, check, config, undisturbed

__all__ = ["undisturbed"]  # a fixture

GATE = Gate(window_s=10.0, min_requests=10, max_error_rate=0.01, max_slowdown=1.5)


def sample(ended: int, failed: int = 0, ttft_s: float = 0.1, itl_s: float = 0.02) -> Sample:
    return Sample(ended, failed, ended * ttft_s, ended * 100 * itl_s, ended * 100)


@pytest.mark.parametrize(
    ("old", "new", "elapsed_s", "decision", "reason"),
    [
        (sample(100), sample(50), 5.0, Decision.WAIT, "50 requests at new workers"),
        (sample(100), sample(50), 10.0, Decision.PASS, "50 requests at new workers"),
        (sample(100), sample(5), 10.0, Decision.WAIT, "10 are wanted"),
        (sample(100), sample(5), 30.0, Decision.WAIT, "10 are wanted"),
        (sample(100), sample(5), 100.0, Decision.PASS, "5 requests"),
        (sample(100), sample(0), 30.0, Decision.FAIL, "hardly asked"),
        (sample(3), sample(5), 30.0, Decision.PASS, "no traffic"),
        (sample(100), sample(7, 3), 1.0, Decision.FAIL, "3 of 10 requests failed at new workers, 0 of 100"),
        (sample(100), sample(1, 1), 1.0, Decision.WAIT, "2 requests"),
        (sample(80, 20), sample(85, 15), 10.0, Decision.PASS, ""),  # old ones fail as often: not the upgrade's fault
        (
            sample(100),
            sample(50, ttft_s=0.17),
            10.0,
            Decision.FAIL,
            "a first token takes 170.0 ms at",
        ),
        (sample(100), sample(50, itl_s=0.05), 10.0, Decision.FAIL, "a token takes 50.0 ms"),
        (sample(100, ttft_s=0.001), sample(50, ttft_s=0.009), 10.0, Decision.PASS, ""),  # noise of short times
        (sample(5), sample(50, ttft_s=9.0), 10.0, Decision.PASS, ""),  # nobody to compare with
    ],
)
def test_the_gate(old: Sample, new: Sample, elapsed_s: float, decision: Decision, reason: str) -> None:
    verdict = judge(GATE, 0.1, old, new, elapsed_s)
    assert verdict.decision is decision, verdict
    assert reason in verdict.reason


def test_limits_that_are_named_hold_whatever_old_workers_do() -> None:
    gate = Gate(window_s=10.0, min_requests=10, ttft_s=0.2, itl_s=0.03)
    assert judge(gate, 0.1, sample(100), sample(50, ttft_s=0.19), 10.0).decision is Decision.PASS
    assert "more than 200.0" in judge(gate, 0.1, sample(100, ttft_s=0.3), sample(50, ttft_s=0.3), 10.0).reason
    assert "more than 30.0" in judge(gate, 0.1, sample(100), sample(50, itl_s=0.04), 10.0).reason


def another_revision(folder: Path) -> Path:
    """The same weights under another hash: what is drawn stays the same, pages do not."""
    copy = folder / "next"
    shutil.copytree(MODEL, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    return copy


QUICK = Gate(window_s=1.0, min_requests=2, max_slowdown=1000.0)


async def test_a_revision_is_replaced_under_load(tmp_path: Path, undisturbed: list[list[int]]) -> None:
    model = another_revision(tmp_path)
    async with hosted(config(prefill=1, decode=2)) as deployment:
        async with Load(deployment, max_tokens=MAX_TOKENS) as load:
            await load.more(2)
            upgrade = await deployment.controller.upgrade(Plan(str(model), QUICK, share=0.5))
            assert await deployment.controller.upgrade(Plan(str(model), QUICK)) is upgrade
            with pytest.raises(InvalidInput, match="is under way"):
                await deployment.controller.upgrade(Plan(str(MODEL), QUICK))
            with pytest.raises(InvalidInput, match="cannot change during an upgrade"):
                deployment.controller.scale("decode", 3)
            stages = [progress.stage async for progress in upgrade.follow()]
            await load.more(2)
        check(load, undisturbed)
        assert list(dict.fromkeys(stages)) == [
            UpgradeStage.STARTING,
            UpgradeStage.PROVING,
            UpgradeStage.ROLLING,
            UpgradeStage.DONE,
        ]
        assert await revisions(deployment) == [ModelConfig.from_folder(model).revision] * 3
        assert [deployment.controller.replicas(role.value) for role in Role] == [1, 2]
        assert deployment.controller.status().model == Path(MODEL).name  # callers need not know
    assert set(deployment.pinned) == {0}


async def test_the_same_revision_is_replaced_by_new_processes_under_load(undisturbed: list[list[int]]) -> None:
    """Prompts that repeat are cached at the old worker: left to the policy, new ones would hardly be asked."""
    gate = Gate(window_s=1.0, min_requests=8, max_slowdown=1000.0)
    async with hosted(config(prefill=1, decode=1)) as deployment:
        async with Load(deployment, num_lanes=1, max_tokens=MAX_TOKENS) as load:
            await load.more(6)
            upgrade = await deployment.controller.upgrade(Plan("", gate, share=1.0))
            told = [progress async for progress in upgrade.follow()]
            await load.more(2)
        check(load, undisturbed)
        assert told[-1].stage is UpgradeStage.DONE, told[-1].detail
        counts = [found for one in told if (found := re.match(r"(\d+) requests at new workers, (\d+)", one.detail))]
        at_new, at_old = map(int, counts[-1].groups())
        assert at_old <= 2, counts[-1]  # that were under way before the routers heard of the share
        assert at_new > at_old, counts[-1]
        assert set(deployment.members()) == {"decode-1", "prefill-1", "router-0"}
    assert set(deployment.pinned) == {0}


async def revisions(deployment: Hosted) -> list[str]:
    found = []
    for member in deployment.members().values():
        if member.role in list(Role):
            async with make_channel(member.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                found.append((await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)).model_revision)
    return found


async def test_new_workers_that_do_worse_are_taken_back(tmp_path: Path, undisturbed: list[list[int]]) -> None:
    model = another_revision(tmp_path)
    async with hosted(config(prefill=1, decode=1)) as deployment:
        before = deployment.members()
        async with Load(deployment, max_tokens=MAX_TOKENS) as load, make_channel(deployment.admin) as channel:
            request = admin_pb2.UpgradeRequest(
                model=str(model), share=0.5, window_s=1.0, min_requests=2, ttft_s=60.0, itl_s=1e-9
            )
            told = [one async for one in admin_pb2_grpc.AdminStub(channel).Upgrade(request, timeout=60)]
            await load.more(2)
        check(load, undisturbed)
        assert told[-1].stage == "rolled back"
        assert "a token takes" in told[-1].detail
        assert deployment.members() == before
        assert set(await revisions(deployment)) == {ModelConfig.from_folder(MODEL).revision}
        assert [deployment.controller.replicas(role.value) for role in Role] == [1, 1]


async def test_an_upgrade_that_cannot_be_is_refused_and_one_that_does_not_start_is_taken_back(tmp_path: Path) -> None:
    model = another_revision(tmp_path)
    async with hosted(config(prefill=0, decode=1)) as deployment:
        controller = deployment.controller
        with pytest.raises(CheckpointError):
            await controller.upgrade(Plan(str(tmp_path / "nowhere"), QUICK))
        with pytest.raises(InvalidInput, match="no upgrade under way"):
            controller.abort_upgrade()
        tokenizer = model / "tokenizer.json"
        whole = tokenizer.read_bytes()
        tokenizer.write_bytes(whole + b"\n")
        with pytest.raises(InvalidInput, match="whose tokenizer is not that of the model"):
            await controller.upgrade(Plan(str(model), QUICK))
        tokenizer.write_bytes(whole)
        upgrade = await controller.upgrade(Plan(str(model), QUICK))
        for path in model.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:100])
        told = [progress async for progress in upgrade.follow()]
        assert told[-1].stage is UpgradeStage.ROLLED_BACK
        assert "decode-1 was lost" in told[-1].detail
        assert set(deployment.members()) == {"decode-0", "router-0"}


async def test_an_operator_may_take_an_upgrade_back(tmp_path: Path) -> None:
    async with hosted(config(prefill=0, decode=1)) as deployment:
        upgrade = await deployment.controller.upgrade(Plan("", Gate(window_s=60.0)))
        async for progress in upgrade.follow():
            if progress.stage is UpgradeStage.PROVING:
                deployment.controller.abort_upgrade()
        assert upgrade.progress.detail == "an operator aborted it"
        assert set(deployment.members()) == {"decode-0", "router-0"}


SHORT = 24


def other_weights(folder: Path) -> Path:
    """Of the same shape and tokenizer; it draws other tokens."""
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


async def test_two_truly_different_revisions_serve_side_by_side_and_neither_uses_the_others_pages(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    """Each request's tokens are those of the revision that served it; back where it was, all are those of the old."""
    model = other_weights(tmp_path)
    engine = Engine.load(EngineConfig.model_validate({"model": str(model), **ENGINE}))
    drawn = {
        False: [tokens[:SHORT] for tokens in undisturbed],
        True: [
            generate(engine, prompt, SamplingParams(max_tokens=SHORT, seed=number, **SAMPLING))  # type: ignore[arg-type]
            for number, prompt in enumerate(PROMPTS)
        ],
    }
    assert all(old != new for old, new in zip(drawn[False], drawn[True], strict=True))
    async with hosted(config(prefill=1, decode=1)) as deployment, AsyncClient(deployment.grpc, timeout_s=60) as client:

        async def ask_all() -> list[bool]:
            """Whether each prompt was served by the new revision."""
            served = []
            for number, prompt in enumerate(PROMPTS):
                result = await client.complete(prompt, max_tokens=SHORT, seed=number, **SAMPLING)  # type: ignore[arg-type]
                assert result.timing is not None
                is_new = result.timing.decode_worker == "decode-1"
                assert result.timing.prefill_worker.endswith("-1" if is_new else "-0")
                assert list(result.token_ids) == drawn[is_new][number]
                served.append(is_new)
            return served

        assert not any(await ask_all())
        upgrade = await deployment.controller.upgrade(Plan(str(model), Gate(window_s=600.0), share=0.5))
        async for progress in upgrade.follow():
            if progress.stage is UpgradeStage.PROVING:
                break
        sides = set()
        async with asyncio.timeout(60):
            while len(sides) < 2:
                sides |= set(await ask_all())
        sides |= set(await ask_all())  # prompts that both have cached by now
        cached: dict[str, set[bytes]] = {}
        for name, worker in deployment.workers.items():
            assert worker.host.server.replica is not None
            cached[name] = set(worker.host.server.replica.engine.prefix_cache._chains.nodes)
        assert all(cached.values())
        old, new = (cached[f"decode-{n}"] | cached[f"prefill-{n}"] for n in range(2))
        assert old.isdisjoint(new)
        deployment.controller.abort_upgrade()
        async for progress in upgrade.follow():
            last = progress
        assert last.stage is UpgradeStage.ROLLED_BACK
        assert not any(await ask_all())
        assert set(deployment.members()) == {"decode-0", "prefill-0", "router-0"}
        staying = deployment.workers[WorkerId("decode-0")].host.server.replica
        assert staying is not None
        assert new.isdisjoint(staying.engine.prefix_cache._chains.nodes)  # those that left handed nothing over
    assert set(deployment.pinned) == {0}
