"""Tests preemption, migration, failover, lost routers and lookaside during an update of the weights.

In every case, each token must be the one that an engine with the weights of its version generates after the tokens
before it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.client.async_client import AsyncClient
from penstock.client.results import Chunk
from penstock.client.retry import RetryPolicy
from penstock.config import LoadedWeightsConfig
from penstock.rpc.secret import ClusterSecret
from penstock.rpc.server import make_channel
from penstock.types import PauseMode
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.cluster.lifecycle.test_flips import config
from tests.cluster.lifecycle.test_weight_processes import (
    LONG,
    Fleet,
    Fresh,
    begin,
    prompt,
    tokens_by_version,
)
from tests.support.engine.checkpoints import perturb_weights
from tests.support.key_files import write_secret
from tests.support.plain_processes import Deployment, wait_until_followed
from tests.support.supervised_processes import plain_deployment
from tests.system.test_faults import GREEDY, MODEL, TIMEOUT_S, load_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedWeightsConfig]:
    folder = tmp_path_factory.mktemp("weights")
    return [perturb_weights(MODEL, folder / "v1", 1)]


@pytest.fixture(scope="module")
def fresh(weights: list[LoadedWeightsConfig]) -> Fresh:
    return Fresh(weights)


async def read(stream: object, chunks: list[Chunk], until: Callable[[Chunk], bool], more: int = 0) -> None:
    """Collects chunks up to the first that fulfils the condition, and `more` after it."""
    left = more + 1
    async for chunk in stream:  # type: ignore[attr-defined]
        chunks.append(chunk)
        if left <= more or until(chunk):
            left -= 1
        if not left:
            return


def is_new(chunk: Chunk) -> bool:
    return chunk.weight_version == 1


async def test_preempted_sequences_survive_an_update(weights: list[LoadedWeightsConfig], fresh: Fresh) -> None:
    """Four answers need more pages than there are, so some are preempted when the weights change."""
    asked = [prompt() for _ in range(4)]
    with Deployment() as deployment:
        fleet = Fleet(deployment, weights, ["decode-0"], num_pages=40)
        await fleet.prepare_all()
        async with fleet.client(retry=RetryPolicy(max_attempts=1)) as client:
            streams = [client.generate(each, max_tokens=500, **GREEDY) for each in asked]  # type: ignore[arg-type]
            chunks: list[list[Chunk]] = [[] for _ in streams]

            async def follow(place: int) -> None:
                async for chunk in streams[place]:
                    chunks[place].append(chunk)

            reading = [asyncio.create_task(follow(place)) for place in range(len(streams))]
            async with asyncio.timeout(TIMEOUT_S):
                while (await load_of(fleet.decode)).metrics["preemptions"] == 0:
                    pass
            await fleet.apply_all(PauseMode.KEEP)
            await asyncio.gather(*reading)
        found = [tokens_by_version(each, text, fresh) for each, text in zip(chunks, asked, strict=True)]
        assert all(sum(map(len, each.values())) == 500 for each in found)
        assert any(1 in each for each in found)


async def test_sequences_migrate_and_fail_over_only_between_matching_weights(
    weights: list[LoadedWeightsConfig], fresh: Fresh
) -> None:
    asked = prompt()
    with Deployment() as deployment:
        fleet = Fleet(deployment, weights, ["decode-0", "decode-1"])
        wait_until_followed(fleet.router, 2)
        await asyncio.gather(*(fleet.prepare(worker, weights[0]) for worker in fleet.workers.values()))
        async with fleet.client(retry=RetryPolicy(max_attempts=1)) as client:
            stream, chunks = await begin(client, asked)
            loads = {name: await load_of(worker) for name, worker in fleet.workers.items()}
            source, target = sorted(loads, key=lambda name: -loads[name].num_running)
            await fleet.apply(fleet.workers[target], PauseMode.WAIT)
            async with make_channel(fleet.addresses[list(fleet.workers).index(target)]) as channel:
                described = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=60)
            request = worker_pb2.MigrateRequest(
                worker_id=target,
                epoch=described.epoch,
                address=fleet.addresses[list(fleet.workers).index(target)],
                source_address=fleet.workers[source].address,
            )
            async with make_channel(fleet.workers[source].address) as channel:
                answer = await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=TIMEOUT_S)
            assert list(answer.migrated) == []
            assert "model_revision" in answer.failed[0].error.message
            await read(stream, chunks, lambda chunk: True, more=3)
            assert not any(map(is_new, chunks))
            fleet.workers[source].kill()
            await read(stream, chunks, is_new, more=20)
        assert tokens_by_version(chunks, asked, fresh).keys() == {0, 1}


async def test_a_client_that_lost_its_router_during_an_update_continues_with_the_new_weights(
    weights: list[LoadedWeightsConfig], fresh: Fresh
) -> None:
    asked = prompt()
    with Deployment() as deployment:
        fleet = Fleet(deployment, weights, ["decode-0"])
        await fleet.prepare_all()
        async with fleet.client(retry=RetryPolicy(max_attempts=1)) as client:
            _, chunks = await begin(client, asked)
        fleet.router.kill()
        await fleet.apply_all(PauseMode.WAIT, 0.1)
        other = deployment.start_router(fleet.router_config)
        before = [token for chunk in chunks for token in chunk.token_ids]
        request = inference_pb2.GenerateRequest(token_ids=asked)
        request.sampling.max_tokens, request.sampling.seed = len(before) + 30, 5
        request.sampling.temperature, request.sampling.ignore_eos = 0.0, True
        request.emitted.add(index=0, token_ids=before)
        after: list[int] = []
        async with make_channel(other.address) as channel:
            async for message in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=TIMEOUT_S):
                assert message.weight_version == 1
                after += message.token_ids
    assert after == fresh.tokens(1, asked + before, 30)


async def test_lookaside_streams_survive_an_update_without_a_retry(
    weights: list[LoadedWeightsConfig], fresh: Fresh, tmp_path: Path
) -> None:
    asked = prompt()
    write_secret(tmp_path / "secret", ClusterSecret("s" * 32))
    with Deployment() as deployment:
        fleet = Fleet(deployment, weights, ["decode-0"], lookaside=tmp_path / "secret")
        await fleet.prepare_all()
        async with fleet.client(retry=RetryPolicy(max_attempts=1), lookaside=True) as client:
            stream = client.generate(asked, max_tokens=LONG, seed=3, **GREEDY)  # type: ignore[arg-type]
            chunks = [await anext(stream) for _ in range(3)]
            await fleet.apply_all(PauseMode.KEEP)
            await read(stream, chunks, is_new, more=20)
        assert tokens_by_version(chunks, asked, fresh).keys() == {0, 1}


async def test_a_worker_killed_during_its_pause_returns_with_the_new_weights(
    weights: list[LoadedWeightsConfig], fresh: Fresh
) -> None:
    asked = prompt()
    async with plain_deployment(config(prefill=1, decode=2)) as deployment:
        async with AsyncClient(
            deployment.grpc_address, timeout_s=TIMEOUT_S, retry=RetryPolicy(max_attempts=1)
        ) as client:
            stream, chunks = await begin(client, asked)
            running = await deployment.until(lambda status: any(each.load.num_running for each in status.workers))
            victim = next(each for each in running.workers if each.load.num_running)
            updating = asyncio.create_task(update(deployment.admin_address, weights[0].path))
            await deployment.until(
                lambda status: (
                    victim.member.worker_id
                    in [each.member.worker_id for each in status.workers if each.state == "paused"]
                )
            )
            os.kill(victim.pid, signal.SIGKILL)
            await read(stream, chunks, is_new, more=20)
            progress = await updating
        assert tokens_by_version(chunks, asked, fresh).keys() == {0, 1}
        assert (progress.stage, progress.num_updated) == ("done", 2)
        assert victim.member.worker_id in progress.detail
        await deployment.until(lambda status: [each.state for each in status.workers] == ["ready"] * 4)
        async with make_channel(deployment.admin_address) as channel:
            held = await admin_pb2_grpc.AdminStub(channel).WeightsStatus(admin_pb2.WeightsStatusRequest(), timeout=60)
        assert [(each.state, each.version) for each in held.workers] == [("ready", 1)] * 3


async def update(admin: str, path: str) -> admin_pb2.WeightsProgress:
    """Updates the weights while running requests may end; returns the last progress."""
    async with make_channel(admin) as channel:
        request = admin_pb2.UpdateWeightsRequest(path=path, mode="wait", timeout_s=60)
        stages = [each async for each in admin_pb2_grpc.AdminStub(channel).UpdateWeights(request, timeout=240)]
    return stages[-1]
