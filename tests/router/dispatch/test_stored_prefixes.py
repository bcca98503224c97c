"""Tests a router and workers with a shared store: it counts on what the store holds, and they read it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker.server import DecodeServer
from penstock.client.async_client import AsyncClient
from penstock.client.results import Completion
from penstock.config import RouterConfig
from penstock.types import SHARED_STORE
from router.routing.policy import pulls
from router.server import RouterServer
from tests.support.router.router_fakes import all_followed, until
from tests.support.serving import wait_until_empty, workers
from tests.worker.store.test_shared_store import PROMPT, RUN, always, model, objects, sharing

__all__ = ["always", "model"]  # fixtures

OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@contextlib.asynccontextmanager
async def routed(folder: Path, model: Path, *names: str) -> AsyncIterator[tuple[RouterServer, list[DecodeServer]]]:
    """Starts decode workers that share a store, and a router that knows them."""
    async with workers(*(sharing(folder, model, name) for name in names)) as servers:
        addresses = tuple(server.address for server in servers)
        router = RouterServer(RouterConfig(model=str(model), grpc_port=0, http_port=0, workers=addresses))
        await router.start()
        try:
            await until(lambda: all_followed(router, len(servers)))
            yield router, list(servers)  # type: ignore[arg-type]
        finally:
            await router.stop()
        await wait_until_empty(*servers)


async def ask(router: RouterServer, prompt: list[int]) -> Completion:
    async with AsyncClient(f"127.0.0.1:{router.ports.grpc}", timeout_s=60) as client:
        return await client.complete(prompt, explain=True, **OPTIONS)


def num_runs(router: RouterServer) -> int:
    """Returns how many runs of the workers' store the router knows."""
    group = router.fleet.group()
    assert group is not None
    assert group.store is not None
    return len(router.fleet.stored.runs(group.store))


async def test_a_prompt_is_placed_by_what_the_store_holds_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "_ADVANTAGE", 1e9)  # however fast this machine computes
    async with routed(tmp_path, model, "first") as (router, _):
        first = await ask(router, PROMPT)
        await until(lambda: num_runs(router) == 3)
    async with routed(tmp_path, model, "second", "third") as (router, _):
        await until(lambda: num_runs(router) == 3)
        answer = await ask(router, PROMPT)
    assert answer.token_ids == first.token_ids
    assert answer.decision is not None
    [completion] = answer.decision["completions"]
    planned, actual = completion["attempts"][0]["predicted"]["pull"], completion["actual"]["pull"]
    assert (planned["source"], planned["tokens"]) == (SHARED_STORE, 3 * RUN)
    assert (actual["source"], actual["pulled_tokens"], actual["problem"]) == (SHARED_STORE, 3 * RUN, "")


@pytest.mark.parametrize("lost", [0, 1])  # one of the two reports the store, and the other goes on with it
async def test_routers_follow_the_store_whichever_worker_is_lost(model: Path, tmp_path: Path, lost: int) -> None:
    async with routed(tmp_path, model, "first", "second") as (router, servers):
        await ask(router, PROMPT)
        await until(lambda: num_runs(router) == 3)
        objects(tmp_path)[0].unlink()
        await until(lambda: num_runs(router) == 2)
        await servers[lost].stop()
        await until(lambda: len(router.fleet.group().decode) == 1)  # type: ignore[union-attr]
        await ask(router, [1, *PROMPT])
        await until(lambda: num_runs(router) >= 5)
