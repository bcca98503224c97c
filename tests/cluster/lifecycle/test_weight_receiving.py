"""Tests the controller's and the worker's side of a broadcast without one: who gets which rank, and what follows a
failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.lifecycle.weights.weight_update import WeightsPlan, WeightsStage, WeightUpdate
from cluster.local.role_host import RoleHost
from cluster.pools.pool import Incarnation
from cluster.pools.weight_change import ApplyWeights, DiscardWeights, PrepareWeights, ReceiveWeights, WeightChange
from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast
from penstock.config import LoadedWeightsConfig
from penstock.errors import CheckpointError, Unavailable
from penstock.types import PauseMode, WorkerId

BROADCAST = WeightsBroadcast("10.0.0.9:7000", "0" * 32, 10, "0" * 64, 5.0, 50.0)
PLAN = WeightsPlan(LoadedWeightsConfig(version=3, path="/steps/3", digest=""), PauseMode.KEEP, 60.0, BROADCAST)
WORKERS = [Incarnation(WorkerId(name), 1) for name in ("decode-0", "decode-1", "prefill-0")]


class FakeWeightFleet:
    """Implements `WeightFleet` with workers that do whatever they are asked for, except for the `lost` one."""

    def __init__(self, workers: Sequence[Incarnation] = WORKERS, *, lost: str = "", shows_folder: bool = True) -> None:
        self._workers = list(workers)
        self._lost = lost
        self._shows_folder = shows_folder
        self.changes: dict[str, list[WeightChange]] = {worker.worker_id: [] for worker in workers}
        self.decided: list[LoadedWeightsConfig] = []

    def outdated(self, version: int, *, answering: bool) -> Sequence[Incarnation]:
        return list(self._workers)

    async def digest_of(self, path: str) -> str:
        if not self._shows_folder:
            raise CheckpointError(f"{path} holds neither model.safetensors nor its index")
        return f"digest of {path}"

    async def change(self, incarnation: Incarnation, change: WeightChange) -> None:
        self.changes[incarnation.worker_id].append(change)
        if incarnation.worker_id == self._lost and isinstance(change, ReceiveWeights):
            raise Unavailable("the broadcast broke off: it is gone")
        if isinstance(change, ApplyWeights):
            self._workers.remove(incarnation)

    def decide(self, weights: LoadedWeightsConfig) -> None:
        self.decided.append(weights)

    def replace(self, incarnation: Incarnation, reason: str) -> None:
        raise AssertionError(f"{incarnation} is not to be replaced: {reason}")


async def test_every_worker_has_a_rank_of_its_own_and_one_writes_the_folder() -> None:
    fleet = FakeWeightFleet()
    update = WeightUpdate(PLAN, fleet)
    assert update.progress.stage is WeightsStage.RECEIVING
    await update.run()
    assert (update.progress.stage, update.progress.num_received, update.progress.num_updated) == ("done", 3, 3)
    weights = PLAN.weights.model_copy(update={"digest": "digest of /steps/3"})
    assert fleet.decided == [weights]
    for rank, worker in enumerate(WORKERS, 1):
        assert fleet.changes[worker.worker_id] == [
            ReceiveWeights(BROADCAST, BroadcastMember(rank, 4, "/steps/3" if rank == 1 else "")),
            PrepareWeights(weights),
            ApplyWeights(PauseMode.KEEP, 60.0),
        ]


@pytest.mark.parametrize(
    ("fleet", "problem"),
    [
        (FakeWeightFleet(lost="decode-1"), "decode-1: the broadcast broke off: it is gone"),
        (FakeWeightFleet(shows_folder=False), "the controller: /steps/3 holds neither model.safetensors nor its index"),
        (FakeWeightFleet([]), "no worker is ready to receive; broadcast again later"),
    ],
)
async def test_workers_free_what_they_received_unless_all_have_it_and_the_folder_is_there(
    fleet: FakeWeightFleet, problem: str
) -> None:
    update = WeightUpdate(PLAN, fleet)
    await update.run()
    assert (update.progress.stage, update.progress.detail) == (WeightsStage.FAILED, problem)
    assert fleet.decided == []
    for changes in fleet.changes.values():
        assert [type(each) for each in changes] == [ReceiveWeights, DiscardWeights]


async def test_a_worker_frees_weights_only_after_it_has_received_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next controller has workers discard what they received for one that died, while they still receive it."""
    calls: list[str] = []
    started, may_end = asyncio.Event(), asyncio.Event()

    async def receive(broadcast: WeightsBroadcast, member: BroadcastMember) -> None:
        calls.append("receiving")
        started.set()
        await may_end.wait()
        calls.append("received")

    async def discard() -> None:
        calls.append("discarded")

    host = object.__new__(RoleHost)
    monkeypatch.setattr(host, "_changing_weights", asyncio.Lock(), raising=False)
    monkeypatch.setattr(host, "receive_weights", receive)
    monkeypatch.setattr(host, "discard_weights", discard)
    receiving = asyncio.create_task(host.change_weights(ReceiveWeights(BROADCAST, BroadcastMember(1, 2))))
    async with asyncio.timeout(60):
        await started.wait()
        discarding = asyncio.create_task(host.change_weights(DiscardWeights()))
        await asyncio.sleep(0)  # lets it begin
        may_end.set()
        await asyncio.gather(receiving, discarding)
    assert calls == ["receiving", "received", "discarded"]
