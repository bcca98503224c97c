"""Workers that change their role, pools that shrink and workers that are restarted, under load and without a trace."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig, ServeConfig
from penstock.grpc_server import make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.hosted import PROMPTS, SAMPLING, Hosted, Load, hosted
from tests.test_faults import MODEL

MAX_TOKENS = 120
ENGINE = {"num_pages": 256, "num_threads": 1, "dtype": "float32"}


def config(prefill: int, decode: int, **settings: object) -> ServeConfig:
    return ServeConfig.model_validate(
        {
            "model": str(MODEL),
            "engine": ENGINE,
            "prefill_pool": {"replicas": prefill},
            "decode_pool": {"replicas": decode},
            "start_timeout_s": 60,
            **settings,
        }
    )


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    engine = Engine.load(EngineConfig.model_validate({"model": str(MODEL), **ENGINE}))
    return [
        generate(engine, prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=number, **SAMPLING))  # type: ignore[arg-type]
        for number, prompt in enumerate(PROMPTS)
    ]


def check(load: Load, undisturbed: list[list[int]]) -> None:
    assert load.errors == []
    for one in load.answered:
        assert one.token_ids == undisturbed[one.prompt]
        assert one.num_redispatches == 0


async def flip(deployment: Hosted, worker_id: str, role: Role) -> list[admin_pb2.FlipProgress]:
    async with make_channel(deployment.admin) as channel:
        request = admin_pb2.FlipRequest(worker_id=worker_id, role=role.value)
        return [one async for one in admin_pb2_grpc.AdminStub(channel).Flip(request, timeout=60)]


async def test_roles_flip_to_and_fro_under_load(undisturbed: list[list[int]]) -> None:
    async with hosted(config(prefill=2, decode=2)) as deployment:
        engines = {name: one.host.server.replica.engine for name, one in deployment.workers.items()}
        async with Load(deployment, max_tokens=MAX_TOKENS) as load:
            await load.more(4)
            for _ in range(3):
                for worker_id, role, successor in (
                    ("prefill-1", Role.DECODE, "decode-2"),
                    ("decode-2", Role.PREFILL, "prefill-1"),
                ):
                    told = await flip(deployment, worker_id, role)
                    assert (told[-1].stage, told[-1].worker_id) == ("ready", successor)
                    assert worker_id not in deployment.members()
                    await load.more(4)
            pools = [one.partition("-")[0] for one in deployment.members()]
            assert (pools.count("prefill"), pools.count("decode")) == (2, 2)
        check(load, undisturbed)
        assert deployment.workers["prefill-1"].host.server.replica.engine is engines["prefill-1"]
        assert len(deployment.workers) == 4  # none was started anew
    assert deployment.pinned == [0, 0, 0, 0]
