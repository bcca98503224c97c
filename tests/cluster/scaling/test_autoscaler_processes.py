"""Tests the autoscaler over real processes: load adds a worker, its end drains one, and no request fails."""

from __future__ import annotations

import pytest

from cluster.cli.commands.inspecting.explain import format_record
from penstock.config import ServeConfig
from penstock.rpc.server import make_channel
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.support.hosted import Load
from tests.support.supervised_processes import plain_deployment
from tests.system.test_faults import MODEL

pytestmark = pytest.mark.processes

# The page pool is the limit, since the pages of a request do not depend on the machine's speed.
NUM_PAGES, NUM_LANES, MAX_TOKENS = 64, 12, 100
CONFIG = ServeConfig.model_validate(
    {
        "model": str(MODEL),
        "engine": {"num_pages": NUM_PAGES, "num_threads": 1, "dtype": "float32"},
        "decode_pool": {"replicas": 1, "max_replicas": 2},
        "http_port": 0,
        "grpc_port": 0,
        "admin_port": 0,
        "routers": 1,
        "start_timeout_s": 120,
        "autoscaler": {
            "mode": "on",
            "slo": {"ttft_s": 60, "itl_s": 10},
            "interval_s": 0.2,
            "history_s": 3,
            "up_cooldown_s": 0,
            "down_cooldown_s": 0,
            "down_after_s": 1.5,
            "start_s": 2,
            "flips": False,
        },
    }
)


def decode_states(status: admin_pb2.StatusResponse) -> list[str]:
    return [each.state for each in status.workers if each.member.role == "decode"]


async def test_load_adds_a_worker_and_its_end_drains_one_without_a_failed_request() -> None:
    answered = []
    async with plain_deployment(CONFIG) as deployment:
        async with Load(deployment.grpc_address, NUM_LANES, MAX_TOKENS) as heavy:
            await deployment.until(lambda status: decode_states(status) == ["ready", "ready"])
            await heavy.more(NUM_LANES)
        async with Load(deployment.grpc_address, 1, MAX_TOKENS) as light:
            await deployment.until(lambda status: decode_states(status) == ["ready"])
            await light.more(1)
        for each in (heavy, light):
            assert each.errors == []
            answered += each.answered
        async with make_channel(deployment.admin_address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            explained = await stub.Explain(admin_pb2.ExplainRequest(pool="decode", limit=50, changes=True), timeout=60)
            events = [each async for each in stub.Events(admin_pb2.EventsRequest(), timeout=60)]
    up, *_, down = explained.records
    assert (up.verdict, up.current, up.decided) == ("up", 1, 2)
    assert (down.verdict, down.current, down.decided) == ("down", 2, 1)
    assert "workers' pages" in format_record(up)
    assert up.figures["for_pages"] > 1
    happened = [(each.subject, each.what) for each in events]
    assert "from 1 to 2 workers by the autoscaler" in [each.reason for each in events if each.what == "scaled"]
    assert any(subject.startswith("decode") and what == "draining" for subject, what in happened)
    texts = {number: {tuple(each.token_ids) for each in answered if each.prompt == number} for number in range(4)}
    assert all(len(some) == 1 for some in texts.values())  # each prompt has one answer, whichever worker computes it
