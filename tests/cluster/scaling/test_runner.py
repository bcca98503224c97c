"""Tests the autoscaler in the controller: demand reports reach it, pools follow, and decisions are explained."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from cluster.controller.admin_service import start_admin_server
from cluster.controller.composition import make_controller
from penstock import wire
from penstock.config import ServeConfig, parse
from penstock.config.autoscaler import SloConfig
from penstock.errors import ConfigError
from penstock.types import StepTotals, WorkerLoad
from penstock.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from router.metrics.demand_report import DemandCounter
from tests.cluster.controller.test_controller import World as Processes

CONFIG = {
    "model": "models/some-model",
    "prefill_pool": {"max_replicas": 4},
    "decode_pool": {"replicas": 1, "max_replicas": 3},
    "autoscaler": {"mode": "on", "interval_s": 3600.0, "up_cooldown_s": 0.0, "start_s": 1.0, "slo": {"ttft_s": 1.0}},
    "start_timeout_s": 20,
}


class World(Processes):
    def __init__(self, mode: str) -> None:
        super().__init__()
        config = parse(ServeConfig, CONFIG | {"autoscaler": {**CONFIG["autoscaler"], "mode": mode}})  # type: ignore[dict-item]
        self.controller = make_controller(config, self.spawn, self.canary)
        self.tokens = 0

    def report(self) -> None:
        """Reports one more second of work and a long queue from each prefill worker."""
        for (worker_id, _), process in self.processes.items():
            if worker_id.startswith("prefill") and hasattr(process, "report"):
                self.tokens += 1000
                steps = StepTotals(self.tokens // 1000, self.tokens, 0.0, self.tokens / 1000)
                load = WorkerLoad(num_running=1, queued_prefill_tokens=20_000, prefill_steps=steps, total_pages=10)
                process.report(wire.load_to_wire(load))


async def report_demand(world: World, stub: admin_pb2_grpc.AdminStub, count: int) -> None:
    """Reports as a router does, then lets the autoscaler decide."""

    async def reports() -> AsyncIterator[admin_pb2.DemandReport]:
        yield admin_pb2.DemandReport(router="r:1", epoch=7, requests=count, prompt_tokens=1000 * count)

    world.report()
    await stub.ReportDemand(reports(), timeout=60)
    world.controller.scaling.step(time.monotonic())


@contextlib.asynccontextmanager
async def deployment(mode: str) -> AsyncIterator[tuple[World, admin_pb2_grpc.AdminStub]]:
    """Yields a controller whose membership a router watches."""
    world = World(mode)
    await world.ready()
    server, address = await start_admin_server(world.controller, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        watch = stub.WatchMembership(admin_pb2.WatchMembershipRequest(router="r:1"), timeout=60)
        await watch.read()
        yield world, stub
        watch.cancel()
    await world.controller.stop()
    await server.stop()


@pytest.mark.parametrize("mode", ["on", "dry-run"])
async def test_a_pool_follows_its_queue_and_explains_why(mode: str) -> None:
    async with deployment(mode) as (world, stub):
        world.controller.scaling.step(time.monotonic())
        answer = await stub.Explain(admin_pb2.ExplainRequest(pool="prefill"), timeout=60)
        assert answer.mode == mode
        assert [each.verdict for each in answer.records] == ["missing"]
        for count in (1, 2, 3):
            await report_demand(world, stub, count)
        answer = await stub.Explain(admin_pb2.ExplainRequest(pool="prefill", limit=5, changes=True), timeout=60)
        first = answer.records[0]
        assert (first.pool, first.current, first.verdict, first.failed) == ("prefill", 1, "up", "")
        assert "queued tokens" in first.reason
        assert first.figures["queued_tokens"] >= 20_000
        assert world.controller.pool_service.replicas("prefill") == (first.decided if mode == "on" else 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Explain(admin_pb2.ExplainRequest(pool="nothing"), timeout=60)
        assert "give prefill or decode" in str(raised.value.details())


async def test_an_operators_scale_holds_and_must_lie_within_the_bounds() -> None:
    async with deployment("on") as (world, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Scale(admin_pb2.ScaleRequest(pool="prefill", replicas=5), timeout=60)
        assert "max_replicas 4" in str(raised.value.details())
        await stub.Scale(admin_pb2.ScaleRequest(pool="prefill", replicas=1), timeout=60)
        for count in (1, 2, 3):
            await report_demand(world, stub, count)
        found = world.controller.scaling.explain("prefill", 1, changes=False)[0].record
        assert (found.verdict, found.current, found.decided) == ("override", 1, 1)
        assert found.wanted > 1
        assert "set to 1 by an operator" in found.reason


def test_inconsistent_bounds_are_refused() -> None:
    for pool, words in (
        ({"replicas": 3, "max_replicas": 2}, "replicas = 3 is not within"),
        ({"replicas": 1, "min_replicas": 0}, "decode_pool.min_replicas is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse(ServeConfig, {"model": "m", "decode_pool": pool})


def test_a_router_counts_requests_that_meet_the_slo() -> None:
    counter = DemandCounter(SloConfig(ttft_s=1.0, ttft_token_s=0.01, itl_s=0.1))
    for ttft_s in (0.5, 1.9, 2.1):
        counter.arrive(100)
        counter.begin(100, ttft_s)
    counter.end(common_pb2.Usage(prompt_tokens=100, cached_tokens=30, completion_tokens=11), 0.9)
    counter.end(common_pb2.Usage(prompt_tokens=100, completion_tokens=11), 1.1)
    counter.end(common_pb2.Usage(prompt_tokens=100, completion_tokens=1), 0.0)
    report = counter.report("r:1", 7, 2, 200)
    assert (report.requests, report.first_tokens, report.first_tokens_in_time) == (3, 3, 2)
    assert (report.ended, report.ended_in_time, report.cached_tokens, report.ended_prompt_tokens) == (2, 1, 30, 300)
    assert (report.waiting, report.waiting_tokens) == (2, 200)
