"""Tests that adapters can be added, replaced and removed while prefill worker, decode worker and router serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from penstock.client.async_client import AsyncClient
from penstock.config import RouterConfig
from penstock.rpc.secret import ADMIN, ClusterSecret
from penstock.types import Role
from router.server import RouterServer
from tests.support.engine.adapters import make_adapter
from tests.support.key_files import replace, write_secret
from tests.support.router.router_fakes import all_followed, until
from tests.support.serving import wait_until_empty, worker_config, workers

MODEL = Path(__file__).parents[4] / "models" / "penstock-tiny"
ENGINE = {"max_adapters": 1, "max_adapter_rank": 4, "dtype": "float32"}
PROMPT = list(range(100, 140))


@asynccontextmanager
async def router_at(addresses: list[str], **settings: object) -> AsyncIterator[RouterServer]:
    base = {"model": str(MODEL), "grpc_port": 0, "http_port": 0, "workers": tuple(addresses)}
    router = RouterServer(RouterConfig.model_validate(base | settings))
    await router.start()
    try:
        await until(lambda: all_followed(router, len(addresses)))
        yield router
    finally:
        await router.stop()


async def complete(router: RouterServer, model: str, max_tokens: int = 12) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.ports.http}", timeout=60) as http:
        return await http.post("/v1/completions", json=body)


async def listed(router: RouterServer) -> set[str]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.ports.http}", timeout=60) as http:
        return {model["id"] for model in (await http.get("/v1/models")).json()["data"]} - {MODEL.name}


async def is_listed(router: RouterServer, *names: str) -> None:
    limit_s = time.monotonic() + 60
    while (found := await listed(router)) != set(names):
        assert time.monotonic() < limit_s, found
        await asyncio.sleep(0.05)


async def answer(router: RouterServer, model: str) -> str:
    response = await complete(router, model)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.processes
async def test_adapters_are_added_replaced_and_removed_while_the_deployment_serves(tmp_path: Path) -> None:
    first = make_adapter(MODEL, tmp_path / "first", seed=1)
    second = make_adapter(MODEL, tmp_path / "second", seed=2)
    path = tmp_path / "adapters.toml"
    replace(path, '[adapters]\nsql = "first"\n')
    configs = [worker_config(role, MODEL, engine=ENGINE) for role in (Role.PREFILL, Role.DECODE)]
    async with workers(*configs) as servers:
        addresses = [server.address for server in servers]
        async with router_at(addresses, adapters={"one": first.path, "two": second.path}) as fixed:
            wanted = {name: await answer(fixed, name) for name in ("one", "two", MODEL.name)}
        assert len(set(wanted.values())) == 3
        secret = ClusterSecret("s" * 64)
        async with router_at(
            addresses, adapters_file=str(path), security=write_secret(tmp_path / "secret", secret)
        ) as router:
            assert await answer(router, "sql") == wanted["one"]
            assert (await complete(router, "law")).status_code == 404
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.ports.http}", timeout=60) as http:
                loaded = await http.post(
                    "/v1/load_lora_adapter",
                    json={"lora_name": "law", "lora_path": second.path},
                    headers={"authorization": f"Bearer {secret.token(ADMIN)}"},
                )
            assert loaded.status_code == 200, loaded.text
            assert await answer(router, "law") == wanted["two"]

            async with AsyncClient(f"127.0.0.1:{router.ports.grpc}", timeout_s=60) as client:
                stream = client.generate(PROMPT, model="law", max_tokens=60, temperature=0.0, ignore_eos=True)
                started = (await anext(stream)).text
                # The file replaces `sql` and drops `law`, whose stream still runs.
                replace(path, '[adapters]\nsql = "second"\n')
                await is_listed(router, "sql")
                running = started + "".join([chunk.text async for chunk in stream])
            assert running.startswith(wanted["two"])
            assert (await complete(router, "law")).status_code == 404
            assert await answer(router, "sql") == wanted["two"]
            assert await answer(router, MODEL.name) == wanted[MODEL.name]
        await wait_until_empty(*servers)
