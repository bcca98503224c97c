"""The autoscaler over real processes: load comes and a worker is added, load goes and it is drained; nobody notices."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cluster.operations import format_record
from cluster.plain_deployment import PlainDeployment, plain_deployment
from penstock.config import ServeConfig
from penstock.grpc_server import make_channel
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.hosted import Load
from tests.test_faults import MODEL

# Pages decide: how many a request takes does not hang on how quick the machine is.
NUM_PAGES, NUM_LANES, MAX_TOKENS = 64, 12, 100
CONFIG = ServeConfig.model_validate(
    {
        "model": str(MODEL),
        "engine": {"num_pages": NUM_PAGES, "num_threads": 1, "dtype": "float32"},
        "decode_pool": {"replicas": 1, "max_replicas": 2},
        "http_port": 0,
        "grpc_port": 0,
        "admin_port": 0,
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


@dataclass
class _Address:
    grpc: str


@contextlib.asynccontextmanager
async def load(deployment: PlainDeployment, num_lanes: int) -> AsyncIterator[Load]:
    where = _Address(deployment.grpc_address)
    async with Load(where, num_lanes=num_lanes, max_tokens=MAX_TOKENS) as one:  # type: ignore[arg-type]
        yield one


def decode_states(status: admin_pb2.StatusResponse) -> list[str]:
    return [one.state for one in status.workers if one.member.role == "decode"]


async def test_a_worker_comes_with_the_load_and_goes_with_it_and_no_request_fails() -> None:
    answered = []
    async with plain_deployment(CONFIG) as deployment:
        async with load(deployment, NUM_LANES) as heavy:
            await deployment.until(lambda status: decode_states(status) == ["ready", "ready"])
            await heavy.more(NUM_LANES)
        async with load(deployment, 1) as light:
            await deployment.until(lambda status: decode_states(status) == ["ready"])
            await light.more(1)
        for one in (heavy, light):
            assert one.errors == []
            answered += one.answered
        async with make_channel(deployment.admin_address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            told = await stub.Explain(admin_pb2.ExplainRequest(pool="decode", limit=50, changes=True), timeout=10)
            events = [one async for one in stub.Events(admin_pb2.EventsRequest(), timeout=10)]
    up, *_, down = told.records
    assert (up.verdict, up.current, up.decided) == ("up", 1, 2)
    assert (down.verdict, down.current, down.decided) == ("down", 2, 1)
    assert "workers' pages" in format_record(up)
    assert up.figures["for_pages"] > 1
    said = [(one.subject, one.what) for one in events]
    assert "from 1 to 2 workers by the autoscaler" in [one.reason for one in events if one.what == "scaled"]
    assert any(subject.startswith("decode") and what == "draining" for subject, what in said)
    texts = {number: {tuple(one.token_ids) for one in answered if one.prompt == number} for number in range(4)}
    assert all(len(some) == 1 for some in texts.values())  # the same wherever and however often they were computed
