"""Broadcasts weights from a trainer to a deployment of processes, without a file of the trainer's.

Afterwards each worker computes what an engine does that has loaded the same weights from safetensors. Where the
trainer, a worker or a tensor fails, every worker keeps its weights and version, and nothing is left of the broadcast.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.cli.commands.operating.weights import format_progress
from engine.weights.checkpoint import list_weight_files
from penstock.client.async_client import AsyncClient
from penstock.client.broadcast.trainer import broadcast_weights
from penstock.config import LoadedWeightsConfig
from penstock.errors import CheckpointError, InvalidInput
from penstock.rpc.server import make_channel
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.cluster.lifecycle.test_flips import config
from tests.cluster.lifecycle.test_weight_processes import Fresh, prompt
from tests.support.engine.checkpoints import perturb_weights
from tests.support.supervised_processes import PlainDeployment, plain_deployment
from tests.system.test_faults import GREEDY, MODEL, TIMEOUT_S

pytestmark = pytest.mark.processes

SENT_BEFORE = 5  # tensors that arrive before the fault
# Broadcasts the weights of a folder, and dies in the middle.
DYING_TRAINER = f"""
import os, sys
from safetensors.torch import load_file
from penstock.client.broadcast.trainer import broadcast_weights

class Tensors(dict):
    num_sent = 0

    def __getitem__(self, name):
        self.num_sent += 1
        if self.num_sent > {SENT_BEFORE}:
            os._exit(9)
        return super().__getitem__(name)

broadcast_weights(Tensors(load_file(sys.argv[1])), sys.argv[2], sys.argv[3])
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedWeightsConfig:
    return perturb_weights(MODEL, tmp_path_factory.mktemp("weights") / "v1", 1)


def tensors_of(weights: LoadedWeightsConfig) -> dict[str, torch.Tensor]:
    return {name: each for file in list_weight_files(Path(weights.path)) for name, each in load_file(file).items()}


async def status(deployment: PlainDeployment) -> admin_pb2.WeightsStatusResponse:
    async with make_channel(deployment.admin_address) as channel:
        found = await admin_pb2_grpc.AdminStub(channel).WeightsStatus(admin_pb2.WeightsStatusRequest(), timeout=60)
        assert isinstance(found, admin_pb2.WeightsStatusResponse)
        return found


async def generate(deployment: PlainDeployment, asked: list[int]) -> tuple[list[int], int]:
    """Returns the tokens of an answer and their version."""
    async with AsyncClient(deployment.grpc_address, timeout_s=TIMEOUT_S) as client:
        (answer,) = (await client.complete(asked, max_tokens=20, **GREEDY)).completions  # type: ignore[arg-type]
    (version,) = set(answer.weight_versions)
    return list(answer.token_ids), version


async def until_replaced(deployment: PlainDeployment, pids: set[int]) -> None:
    """Waits until other processes have replaced these, and all workers are ready."""
    await deployment.until(
        lambda status: (
            all(each.state == "ready" and each.pid not in pids for each in status.workers)
            and len(status.workers) == len(deployment.controller.pools.worker_slots) + 1  # and the router
        )
    )


class Killing(dict[str, torch.Tensor]):
    """Kills a process when some of the tensors have been sent."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], pid: int) -> None:
        super().__init__(tensors)
        self._pid = pid
        self._num_sent = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self._num_sent += 1
        if self._num_sent == SENT_BEFORE:
            os.kill(self._pid, signal.SIGKILL)
        return super().__getitem__(name)


async def test_a_broadcast_reaches_every_worker_and_those_that_start_later(
    weights: LoadedWeightsConfig, tmp_path: Path
) -> None:
    fresh, asked, folder = Fresh([weights]), prompt(), tmp_path / "step-1"
    async with plain_deployment(config(prefill=1, decode=2)) as deployment:
        before = (await generate(deployment, asked))[0]
        assert before == fresh.tokens(0, asked, 20)
        sent = tensors_of(weights)
        assert await asyncio.to_thread(broadcast_weights, sent, folder, deployment.admin_address) == 1
        assert await generate(deployment, asked) == (fresh.tokens(1, asked, 20), 1)
        held = await status(deployment)
        assert [(each.state, each.version) for each in held.workers] == [("ready", 1)] * 3
        assert "version 1 done: 3 received, 3 prepared, 3 updated of 3 workers" in format_progress(held.last)
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == sent.keys()
        assert all(torch.equal(saved[name], sent[name]) for name in sent)
        assert os.listdir(tmp_path) == [folder.name]

        running = await deployment.until(lambda status: status.ready)
        pids = {worker.pid for worker in running.workers if worker.member.role != "router"}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until_replaced(deployment, pids)
        assert await generate(deployment, asked) == (fresh.tokens(1, asked, 20), 1)


async def test_trainers_workers_and_tensors_that_fail_change_nothing(
    weights: LoadedWeightsConfig, tmp_path: Path
) -> None:
    fresh, asked, folder = Fresh([weights]), prompt(), tmp_path / "step-1"
    async with plain_deployment(config(prefill=0, decode=2)) as deployment:
        admin, sent = deployment.admin_address, tensors_of(weights)

        async def check_unchanged() -> None:
            assert await generate(deployment, asked) == (fresh.tokens(0, asked, 20), 0)
            held = await status(deployment)
            assert (held.version, held.last.stage) == (0, "failed")
            assert [(each.state, each.version) for each in held.workers] == [("ready", 0)] * 2
            assert os.listdir(tmp_path) == []

        name = "model.norm.weight"
        with pytest.raises(
            CheckpointError, match=rf"^the old weights stay in force: .*tensor {name} has shape \[\d+\]"
        ):
            await asyncio.to_thread(broadcast_weights, {**sent, name: sent[name][1:]}, folder, admin)
        await check_unchanged()

        (file,) = list_weight_files(Path(weights.path))
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DYING_TRAINER, str(file), str(folder), admin
        )
        assert await asyncio.wait_for(trainer.wait(), TIMEOUT_S) == 9
        assert deployment.controller.weights.last is not None
        async with asyncio.timeout(TIMEOUT_S):
            last = [each async for each in deployment.controller.weights.last.follow()][-1]
        assert "the broadcast broke off" in last.detail
        await check_unchanged()

        running = await deployment.until(lambda status: status.ready)
        victim = next(each.pid for each in running.workers if each.member.worker_id == "decode-1")
        with pytest.raises(CheckpointError, match=r"^the old weights stay in force: .*decode-1: "):
            await asyncio.to_thread(broadcast_weights, Killing(sent, victim), folder, admin, timeout_s=10)
        await until_replaced(deployment, {victim})
        await check_unchanged()

        with pytest.raises(InvalidInput, match=r"path: is .*, which exists; a broadcast is written to a new folder"):
            await asyncio.to_thread(broadcast_weights, sent, tmp_path, admin)
        with pytest.raises(InvalidInput, match=r"path: is 'step-1'; give its absolute path"):
            await asyncio.to_thread(broadcast_weights, sent, "step-1", admin)
        assert await asyncio.to_thread(broadcast_weights, sent, folder, admin, mode="keep", version=4) == 4
        assert await generate(deployment, asked) == (fresh.tokens(1, asked, 20), 4)
