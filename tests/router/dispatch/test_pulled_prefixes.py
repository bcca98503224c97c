"""Tests a router and two decode workers, one of which has cached the prompts: the other pulls them and reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.calling.generate import format_decision
from penstock.client.async_client import AsyncClient
from penstock.config import RouterConfig
from penstock.types import Role, WorkerId
from router.routing.policy import pulls
from router.server import RouterServer
from tests.support.router.router_fakes import all_followed, until
from tests.support.serving import wait_until_empty, worker_config, workers
from worker.pull.policy import PullCosts, PullPlan

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
NUM_TOKENS = 700
PULLED = NUM_TOKENS // 16 * 16


@pytest.mark.parametrize("may_pull", [True, False])
async def test_the_router_selects_the_holder_and_the_worker_pulls_from_it(
    may_pull: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "_ADVANTAGE", 1e9)  # however fast this machine computes
    monkeypatch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, 30.0, 30.0))
    engine = {"num_pages": 1024, "dtype": "float32"}
    configs = [
        worker_config(Role.DECODE, MODEL, f"decode-{number}", engine=engine, decode={"placement": "local"})
        for number in range(2)
    ]
    async with workers(*configs) as servers:
        settings = {"grpc_port": 0, "http_port": 0, "workers": tuple(server.address for server in servers)}
        # At this temperature, either worker is chosen equally often, whatever it has cached.
        router = RouterServer(RouterConfig(model=str(MODEL), pull=may_pull, temperature_s=1e6, **settings))  # type: ignore[arg-type]
        await router.start()
        try:
            await until(lambda: all_followed(router, 2))
            async with AsyncClient(f"127.0.0.1:{router.ports.grpc}", timeout_s=60) as client:
                index = router.fleet.index
                for number in range(24 if may_pull else 4):
                    prompt = [(7 * i + 131 * number) % 900 + 20 for i in range(NUM_TOKENS)]
                    before = {worker_id: index.pages_of(worker_id) for worker_id in index.worker_ids}
                    first = await client.complete(prompt, **OPTIONS)
                    assert first.timing is not None
                    holder = WorkerId(first.timing.decode_worker)
                    wanted = before.get(holder, 0) + PULLED // 16
                    await until(lambda holder=holder, wanted=wanted: index.pages_of(holder) >= wanted)  # type: ignore[misc]
                    again = await client.complete(prompt, explain=True, **OPTIONS)
                    assert again.token_ids == first.token_ids
                    assert again.timing is not None
                    if (pull := again.timing.pull) is not None:
                        break
        finally:
            await router.stop()
        await wait_until_empty(*servers)
    if not may_pull:
        assert pull is None
        return
    assert pull is not None
    assert (pull.source, pull.problem) == (holder, "")
    assert pull.pulled_tokens == pull.wanted_tokens == PULLED == again.timing.cached_tokens
    assert again.decision is not None
    [completion] = again.decision["completions"]
    planned, actual = completion["attempts"][0]["predicted"]["pull"], completion["actual"]["pull"]
    assert (planned["source"], planned["tokens"]) == (pull.source, PULLED)
    assert (actual["pulled_tokens"], actual["problem"]) == (PULLED, "")
    assert f"pulled {PULLED} from {pull.source}" in format_decision(again.decision)
