"""Tests updates of the weights through the controller: they reach every worker or none, and each later worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from cluster.cli.commands.operating.weights import format_progress, format_status
from cluster.controller.composition import make_controller
from cluster.controller.record import ControllerRecord
from cluster.controller.supervised_process import FoundProcess, Started
from cluster.lifecycle.upgrade.gate_policy import UpgradeGate
from cluster.lifecycle.upgrade.rolling_upgrade import UpgradePlan
from cluster.pools.pool import Incarnation
from cluster.pools.weight_change import ApplyWeights, DiscardWeights, PrepareWeights, WeightChange
from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.generate import generate
from penstock.client.async_client import AsyncClient
from penstock.client.results import GenerateResult
from penstock.config import DecodeConfig, EngineConfig, LoadedWeightsConfig
from penstock.errors import CheckpointError, InvalidInput, from_rpc_error
from penstock.rpc.server import make_channel
from penstock.types import Epoch, PauseMode, SamplingParams, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.cluster.controller.test_controller import CONFIG, FakeProcess, World
from tests.cluster.lifecycle.test_flips import ENGINE, config
from tests.decode_worker.schedule.test_prompt_stream import held_prompts
from tests.support.engine.checkpoints import perturb_weights
from tests.support.hosted import PROMPTS, Hosted, Load, hosted
from tests.support.serving import until
from tests.system.test_faults import MODEL

GREEDY = {"temperature": 0.0, "ignore_eos": True}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedWeightsConfig:
    return perturb_weights(MODEL, tmp_path_factory.mktemp("weights") / "v1", 1)


def fresh_tokens(weights: LoadedWeightsConfig | None) -> list[int]:
    """Returns what an engine with these weights generates for the first prompt."""
    engine = Engine.load(EngineConfig.model_validate({"model": str(MODEL), "weights": weights, **ENGINE}))
    try:
        return generate(engine, PROMPTS[0], SamplingParams(max_tokens=MAX_TOKENS, **GREEDY))  # type: ignore[arg-type]
    finally:
        engine.close()


async def update(deployment: Hosted, path: str, **fields: object) -> AsyncIterator[admin_pb2.WeightsProgress]:
    """Yields the progress of an update, or raises its typed error."""
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


async def test_an_update_reaches_every_worker_and_each_later_one(weights: LoadedWeightsConfig) -> None:
    old, new = fresh_tokens(None), fresh_tokens(weights)
    async with hosted(config(prefill=1, decode=2)) as deployment:
        assert list((await ask(deployment)).token_ids) == old
        epochs = {name: member.epoch for name, member in workers(deployment).items()}
        memberships = deployment.controller.membership.watch()
        await anext(memberships)
        async with Load(deployment.grpc, max_tokens=56) as load:
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


async def test_an_update_waits_for_the_step_of_a_prompt_beside_decode_steps(weights: LoadedWeightsConfig) -> None:
    apart = DecodeConfig(placement="local", prompt_sm_share=0.3)
    with held_prompts(len(PROMPTS[0])) as (begun, may_end):
        async with hosted(config(prefill=0, decode=1).model_copy(update={"decode": apart})) as deployment:
            host = deployment.workers[WorkerId("decode-0")].host
            server = host.server
            assert isinstance(server, DecodeServer)
            answer = asyncio.create_task(ask(deployment))
            await until(begun.is_set)

            async def to_the_end() -> str:
                return [each.stage async for each in update(deployment, weights.path, mode="keep")][-1]

            last = asyncio.create_task(to_the_end())
            await until(lambda: not server.worker.requests)  # the pause has ended the request
            assert host.weights_version == 0
            assert server.worker.scheduler.prompts.in_flight
            may_end.set()
            assert await last == "done"
            assert list((await answer).token_ids) == fresh_tokens(weights)


async def test_spares_are_replaced_by_ones_that_hold_the_new_weights(weights: LoadedWeightsConfig) -> None:
    async with hosted(config(prefill=0, decode=1, decode_pool={"replicas": 1, "spares": 1})) as deployment:
        await deployment.until(lambda status: [spare.state for spare in status.spares] == ["warm"])
        assert [each async for each in update(deployment, weights.path)][-1].stage == "done"
        warm = await deployment.until(
            lambda status: [(each.name, each.state) for each in status.spares] == [("decode-spare-1", "warm")]
        )
        assert len(warm.spares) == 1
        deployment.workers[WorkerId("decode-0")].lose()
        spare = deployment.workers[WorkerId("decode-spare-1")].host
        await deployment.until(lambda _: [member.epoch for member in workers(deployment).values()] == [spare.epoch])
        assert spare.weights_version == 1
        assert list((await ask(deployment)).token_ids) == fresh_tokens(weights)


async def test_all_workers_keep_the_old_weights_if_one_cannot_read_the_new_ones(
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


async def test_a_worker_that_fails_to_apply_the_weights_is_replaced(
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


async def test_a_worker_that_starts_during_an_update_serves_with_the_new_weights(
    weights: LoadedWeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(config(prefill=0, decode=1)) as deployment:
        controller = deployment.controller
        may_apply, decided = asyncio.Event(), asyncio.Event()
        host = deployment.workers[WorkerId("decode-0")].host
        apply = host.apply_weights

        async def apply_later(mode: PauseMode, timeout_s: float) -> None:
            decided.set()
            await may_apply.wait()
            await apply(mode, timeout_s)

        monkeypatch.setattr(host, "apply_weights", apply_later)
        controller.pool_service.scale("decode", 2)
        await deployment.until(lambda _: WorkerId("decode-1") in deployment.workers)
        started = deployment.workers[WorkerId("decode-1")]
        updating = await controller.weights.begin(weights.path, 0, PauseMode.KEEP, 60)
        await decided.wait()
        with pytest.raises(InvalidInput, match="model: cannot change while weights are replaced"):
            await controller.upgrading.begin(UpgradePlan(str(MODEL), UpgradeGate()))
        with pytest.raises(
            InvalidInput, match="path: cannot change: the update to version 1 is in flight; wait for it"
        ):
            await controller.weights.begin(weights.path, 0, PauseMode.KEEP, 60)
        assert (await status(deployment)).workers[0].state == "paused"
        may_apply.set()
        assert [each async for each in updating.follow()][-1].num_updated == 1
        await deployment.until(lambda _: len(workers(deployment)) == 2)
        assert deployment.workers[WorkerId("decode-1")] is started
        assert started.host.weights_version == 1
        assert {worker.version for worker in (await status(deployment)).workers} == {1}


class WeightsProcess(FakeProcess):
    """Stands in for a process and records the changes to its weights."""

    changes: list[WeightChange]
    changed: asyncio.Event

    async def change_weights(self, change: WeightChange) -> Started:
        self.changes.append(change)
        self.changed.set()
        return Started(Epoch(99), "decode-0:9", 4000, weights_version=isinstance(change, ApplyWeights))


@pytest.mark.parametrize("is_decided", [False, True])
async def test_the_next_controller_applies_decided_weights_and_discards_undecided_ones(is_decided: bool) -> None:
    world = World()
    weights = LoadedWeightsConfig(version=1, path="/w", digest="d")
    process = WeightsProcess(world, Incarnation(WorkerId("decode-0"), 1))
    process.changes, process.changed = [], asyncio.Event()
    record = ControllerRecord(generation=2, was_ready=True, weights=weights.model_dump() if is_decided else {})
    controller = make_controller(CONFIG, world.spawn, world.canary, record=record)
    found = FoundProcess(process.incarnation, process, Started(Epoch(7), "decode-0:1", 4000))
    controller.recover(record, [found])
    controller.start()
    try:
        async with asyncio.timeout(60):
            await process.changed.wait()
            if controller.weights.last is not None:
                assert [each async for each in controller.weights.last.follow()][-1].num_updated == 1
        wanted = [PrepareWeights(weights), ApplyWeights(PauseMode.KEEP, 60.0)] if is_decided else [DiscardWeights()]
        assert process.changes == wanted
        slot = controller.pools.find_worker("decode-0")
        assert (slot.weights_version, slot.epoch) == ((1, 99) if is_decided else (0, 7))
    finally:
        await controller.stop()


async def test_impossible_updates_are_refused_with_the_reason(weights: LoadedWeightsConfig, tmp_path: Path) -> None:
    async with hosted(config(prefill=0, decode=1)) as deployment:
        for path, fields, problem in (
            ("weights", {}, "path: is 'weights'; give its absolute path"),
            (weights.path, {"mode": "never"}, "mode: is 'never'; give wait, abort, keep"),
        ):
            with pytest.raises(InvalidInput, match=problem):
                await anext(update(deployment, path, **fields))
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            await anext(update(deployment, str(tmp_path)))
        assert [each async for each in update(deployment, weights.path, version=3)][-1].stage == "done"
        with pytest.raises(InvalidInput, match="version: is 3, and the workers have 3; give a higher one"):
            await anext(update(deployment, weights.path, version=3))
