"""Tests updates of the weights through the controller: at every worker or at none, and at all that come later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from cluster.cli.commands.operating.weights import format_progress, format_status
from cluster.controller.record import ControllerRecord
from engine.engine import Engine
from engine.generate import generate
from penstock.client.async_client import AsyncClient
from penstock.client.results import GenerateResult
from penstock.config import EngineConfig, LoadedWeightsConfig
from penstock.errors import CheckpointError, InvalidInput, from_rpc_error
from penstock.rpc.server import make_channel
from penstock.types import SamplingParams, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.cluster.lifecycle.test_flips import ENGINE, config
from tests.support.engine.checkpoints import perturb_weights
from tests.support.hosted import PROMPTS, Hosted, Load, hosted
from tests.system.test_faults import MODEL

GREEDY = {"temperature": 0.0, "ignore_eos": True}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedWeightsConfig:
    return perturb_weights(MODEL, tmp_path_factory.mktemp("weights") / "v1", 1)


def fresh_tokens(weights: LoadedWeightsConfig | None) -> list[int]:
    """Returns what an engine that has loaded these weights answers to the first prompt."""
    engine = Engine.load(EngineConfig.model_validate({"model": str(MODEL), "weights": weights, **ENGINE}))
    try:
        return generate(engine, PROMPTS[0], SamplingParams(max_tokens=MAX_TOKENS, **GREEDY))  # type: ignore[arg-type]
    finally:
        engine.close()


async def update(deployment: Hosted, path: str, **fields: object) -> AsyncIterator[admin_pb2.WeightsProgress]:
    """Yields the progress of an update. Raises its typed error."""
    request = admin_pb2.UpdateWeightsRequest(path=path, **fields)  # type: ignore[arg-type]
    async with make_channel(deployment.admin) as channel:
        try:
            async for progress in admin_pb2_grpc.AdminStub(channel).UpdateWeights(request, timeout=120):
                yield progress
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def workers(deployment: Hosted) -> dict[str, admin_pb2.Member]:
    """Returns the ready workers by name."""
    return {name: member for name, member in deployment.members().items() if member.role != "router"}


async def status(deployment: Hosted) -> admin_pb2.WeightsStatusResponse:
    async with make_channel(deployment.admin) as channel:
        found = await admin_pb2_grpc.AdminStub(channel).WeightsStatus(admin_pb2.WeightsStatusRequest(), timeout=60)
        assert isinstance(found, admin_pb2.WeightsStatusResponse)
        return found


async def ask(deployment: Hosted) -> GenerateResult:
    async with AsyncClient(deployment.grpc, timeout_s=120) as client:
        return await client.complete(PROMPTS[0], max_tokens=MAX_TOKENS, **GREEDY)  # type: ignore[arg-type]


async def test_an_update_reaches_every_worker_and_all_that_come_later(weights: LoadedWeightsConfig) -> None:
    old, new = fresh_tokens(None), fresh_tokens(weights)
    async with hosted(config(prefill=1, decode=2)) as deployment:
        assert list((await ask(deployment)).token_ids) == old
        epochs = {name: member.epoch for name, member in workers(deployment).items()}
        memberships = deployment.controller.membership.watch()
        await anext(memberships)
        async with Load(deployment, max_tokens=56) as load:
            await load.more(2)
            stages = [each async for each in update(deployment, weights.path, mode="keep")]
            await load.more(4)
        assert load.errors == []
        assert (stages[-1].stage, stages[-1].num_updated, stages[-1].detail) == ("done", 3, "")
        assert "version 1 done: 3 prepared, 3 updated of 3 workers" in format_progress(stages[-1])
        assert set((await anext(memberships)).paused) <= epochs.keys()
        members = workers(deployment)
        assert members.keys() == epochs.keys()
        assert all(members[name].epoch != epoch for name, epoch in epochs.items())
        answer = await ask(deployment)
        assert list(answer.token_ids) == new
        assert answer.completions[0].weight_versions == (1,) * MAX_TOKENS

        controller = deployment.controller
        deployment.workers[WorkerId("decode-0")].lose()
        controller.pool_service.scale("decode", 3)
        controller.pool_service.scale("prefill", 0)
        await deployment.until(lambda _: sorted(workers(deployment)) == ["decode-0", "decode-1", "decode-2"])
        held = await status(deployment)
        assert (held.version, held.digest) == (1, weights.digest)
        assert {worker.version for worker in held.workers if worker.state == "ready"} == {1}
        assert "decode-2     ready      version 1" in format_status(held)
        assert list((await ask(deployment)).token_ids) == new
        record = ControllerRecord.from_json(deployment.records[-1].to_json())
        assert record.weights == weights.model_dump()


async def test_a_worker_that_cannot_read_the_weights_leaves_the_old_ones_everywhere(
    weights: LoadedWeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(config(prefill=0, decode=2)) as deployment:
        host = deployment.workers[WorkerId("decode-1")].host

        async def refuse(wanted: LoadedWeightsConfig) -> None:
            raise CheckpointError(f"{wanted.path}: model.embed_tokens.weight is missing; write the whole model")

        monkeypatch.setattr(host, "prepare_weights", refuse)
        epochs = {name: member.epoch for name, member in workers(deployment).items()}
        stages = [each async for each in update(deployment, weights.path)]
        assert stages[-1].stage == "failed"
        assert stages[-1].detail.startswith("decode-1: ")
        assert "model.embed_tokens.weight is missing; write the whole model" in stages[-1].detail
        assert {name: member.epoch for name, member in workers(deployment).items()} == epochs
        assert (await status(deployment)).version == 0
        assert list((await ask(deployment)).token_ids) == fresh_tokens(None)
        monkeypatch.undo()
        assert [each async for each in update(deployment, weights.path, version=7)][-1].stage == "done"
        assert (await status(deployment)).version == 7


async def test_a_worker_that_fails_to_apply_the_weights_is_replaced_by_one_that_has_them(
    weights: LoadedWeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(config(prefill=0, decode=2)) as deployment:
        broken = deployment.workers[WorkerId("decode-1")]

        def fail() -> None:
            raise CheckpointError("the files were changed")

        monkeypatch.setattr(broken.host.server.replica.engine, "apply_weights", fail)  # type: ignore[union-attr]
        stages = [each async for each in update(deployment, weights.path)]
        assert (stages[-1].stage, stages[-1].num_updated) == ("done", 1)
        assert "decode-1: the files were changed" in stages[-1].detail
        await deployment.until(lambda _: len(workers(deployment)) == 2)
        assert deployment.workers[WorkerId("decode-1")] is not broken
        assert [worker.version for worker in (await status(deployment)).workers] == [1, 1]


async def test_impossible_updates_are_refused_with_the_reason(weights: LoadedWeightsConfig, tmp_path: Path) -> None:
    async with hosted(config(prefill=0, decode=1)) as deployment:
        for path, fields, problem in (
            ("weights", {}, "path: is 'weights'; give the folder's whole path"),
            (weights.path, {"mode": "never"}, "mode: is 'never'; give wait, abort, keep"),
        ):
            with pytest.raises(InvalidInput, match=problem):
                await anext(update(deployment, path, **fields))
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            await anext(update(deployment, str(tmp_path)))
        assert [each async for each in update(deployment, weights.path, version=3)][-1].stage == "done"
        with pytest.raises(InvalidInput, match="version: is 3, and the workers have 3; give a higher one"):
            await anext(update(deployment, weights.path, version=3))
