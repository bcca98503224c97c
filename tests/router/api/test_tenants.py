"""Tests tenants at both APIs: who is admitted, whose cached pages count, what each sees. Fake and real workers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import grpc
import httpx
import openai
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.client.async_client import AsyncClient
from penstock.config.tenants import TenantConfig
from penstock.errors import PermissionDenied, Unauthenticated, from_rpc_error
from penstock.kv.page_hash import hash_pages
from penstock.rpc.secret import ClusterSecret, digest_of, make_api_key
from penstock.types import Role
from penstock.v1 import common_pb2, inference_pb2
from router.api.identity import Tenant, TenantDirectory, Tenants
from tests.support.key_files import write_secret
from tests.support.router.router_fakes import MODEL, PAGE_SIZE, FakeWorker, all_followed, running_router, until
from tests.support.serving import worker_config, workers

KEYS = {name: make_api_key() for name in ("acme", "beta", "one", "two", "off")}
TENANTS = {name: {"keys": [digest_of(key)]} for name, key in KEYS.items()}
TENANTS["one"]["share_group"] = TENANTS["two"]["share_group"] = "siblings"
TENANTS["off"]["enabled"] = False
TENANTS["beta"] |= {"lane": "bulk", "max_lane": "standard"}
PROMPT = list(range(300, 300 + 4 * PAGE_SIZE + 3))


def named(name: str) -> Tenant:
    return Tenant(name, TenantConfig.model_validate(TENANTS[name]))


def client(router, tenant: str | None) -> AsyncClient:
    return AsyncClient(router.grpc_address, api_key=KEYS[tenant] if tenant else "", timeout_s=60.0)


@pytest.fixture(name="worker")
async def _worker():
    return await FakeWorker().start()


@pytest.fixture(name="router")
async def _router(worker):
    async with running_router(worker, tenants=TENANTS) as router:
        yield router


async def test_every_grpc_call_requires_a_key(router):
    for key, kind in (("", Unauthenticated), ("psk-wrong", Unauthenticated), (KEYS["off"], PermissionDenied)):
        async with AsyncClient(router.grpc_address, api_key=key) as caller:
            for call in (caller.complete("x", max_tokens=1), caller.tokenize("x"), caller.list_models()):
                with pytest.raises(kind) as caught:
                    await call
                assert not key or key not in caught.value.message
    async with client(router, "acme") as caller:
        assert (await caller.complete("x", max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
        assert (await caller.tokenize("x")).token_ids
        assert [model.id for model in await caller.list_models()] == ["penstock-tiny"]


async def test_health_and_reflection_stay_open(router):
    answer = await health_pb2_grpc.HealthStub(router.channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_http_errors_have_the_form_that_openai_clients_expect(router, worker):
    async def models(key: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key=key, max_retries=0) as caller:
            answer = await caller.chat.completions.create(
                model=MODEL.name, messages=[{"role": "user", "content": "hi"}], max_tokens=1
            )
            assert answer.usage.completion_tokens == 1
            return [model.id async for model in caller.models.list()]

    assert await models(KEYS["acme"]) == [MODEL.name]
    with pytest.raises(openai.AuthenticationError) as caught:
        await models("psk-wrong")
    assert caught.value.body["type"] == "authentication_error"
    assert "psk-wrong" not in str(caught.value.body)
    with pytest.raises(openai.PermissionDeniedError, match="tenant off is turned off"):
        await models(KEYS["off"])
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        for call in (http.get("/v1/models"), http.get("/v1/models/x"), http.post("/v1/completions", content=b"{")):
            answer = await call
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await http.get("/health")).status_code == 200


async def test_a_lane_above_the_tenants_best_is_refused_and_its_own_is_the_default(router, worker):
    async with client(router, "beta") as caller:
        await caller.complete("x", max_tokens=1)
    assert worker.submits[-1].lane == common_pb2.LANE_BULK
    metadata = (("authorization", f"Bearer {KEYS['beta']}"),)
    wanted = inference_pb2.GenerateRequest(text="x", lane=common_pb2.LANE_INTERACTIVE)
    with pytest.raises(grpc.RpcError) as caught:
        _ = [message async for message in router.stub.Generate(wanted, metadata=metadata)]
    assert isinstance(from_rpc_error(caught.value), PermissionDenied)
    assert caught.value.details() == "lane: interactive is not open to this API key; ask for standard or a lower lane"


@pytest.mark.parametrize(("tenant", "uncached_tokens"), [("acme", 1605 - 90 * PAGE_SIZE), ("beta", 1605)])
async def test_a_tenant_gets_credit_only_for_its_own_pages(tenant, uncached_tokens):
    """A prefill worker has cached most of the prompt for acme. Each tenant gets a fresh router."""
    decode = await FakeWorker("decode-0", epoch=1).start()
    prefill = await FakeWorker("prefill-0", epoch=2, role="prefill").start()
    decode.load = replace(decode.load, prefill_tokens_per_s=200.0)
    prefill.load = replace(prefill.load, prefill_tokens_per_s=1000.0)
    prompt = [300 + number % 1000 for number in range(1605)]
    salt = Tenants(lambda: TenantDirectory({})).salt("r1", named("acme").cache_scope)
    prefill.log.stored(hash_pages(prompt, PAGE_SIZE, salt)[:90])
    async with running_router(decode, prefill, tenants=TENANTS) as router:
        async with client(router, tenant) as caller:
            await caller.complete(prompt, max_tokens=1)
    prefill_s = decode.submits[-1].prefill_candidates[0].prefill_s
    assert prefill_s == pytest.approx(uncached_tokens / 1000.0, rel=0.15)


async def test_completions_of_one_request_and_a_redispatch_share_a_salt():
    doomed, other = (
        await FakeWorker("decode-0", epoch=1, pause_at=3).start(),
        await FakeWorker("decode-1", epoch=2).start(),
    )
    async with running_router(doomed, other, tenants=TENANTS, policy="round-robin") as router:
        async with client(router, "acme") as caller:
            stream = caller.generate("x", max_tokens=8, n=2, ignore_eos=True)
            async for _ in stream:
                if doomed.submits and other.submits:
                    break
            await doomed.until(lambda fake: bool(fake.running))
            await doomed.stop()
            await stream.complete()
    submits = doomed.submits + other.submits
    assert len(submits) == 3  # two completions, one of them twice
    assert len({submit.salt for submit in submits}) == 1


def cached_pages(server) -> dict[bytes, int]:
    """Returns the pages of the worker's prefix cache by hash."""
    cache = server.worker._engine.prefix_cache
    cache.check_integrity()
    return {page_hash: node.page for page_hash, node in cache._chains.nodes.items()}


async def test_two_tenants_with_equal_prompts_never_share_a_page(tmp_path):
    """Compares the pools of real workers: equal prompts make equal pages, but no page belongs to both tenants."""
    configs = [worker_config(role, MODEL, name=role.value) for role in Role]
    async with workers(*configs) as servers:
        async with running_router(
            wait=False,
            workers=[server.address for server in servers],
            tenants=TENANTS,
            security=write_secret(tmp_path / "secret", ClusterSecret("s" * 40)),
        ) as router:
            await until(lambda: all_followed(router.server, 2))
            results, made = [], []
            for tenant in ("acme", "beta", "one", "two", "acme"):
                before = [cached_pages(server) for server in servers]
                async with client(router, tenant) as caller:
                    results.append(await caller.complete(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True))
                after = [cached_pages(server) for server in servers]
                assert all(old.items() <= new.items() for old, new in zip(before, after, strict=True))
                made.append([set(new.values()) - set(old.values()) for old, new in zip(before, after, strict=True)])
            tenants, revision = router.server.preparer.tenants, router.server.fleet.group().model_revision
            _check_own_pages(servers, tenants, revision)
    assert len({result.token_ids for result in results}) == 1
    assert [result.usage.cached_tokens for result in results] == [0, 0, 0, 4 * PAGE_SIZE, 4 * PAGE_SIZE]
    assert [result.timing.pages_moved for result in results[:3]] == [5, 5, 5]
    assert [[len(pages) for pages in both] for both in made] == [[4, 4], [4, 4], [4, 4], [0, 0], [0, 0]]


def _check_own_pages(servers, tenants, revision) -> None:
    for server in servers:
        held, pool = cached_pages(server), server.worker._engine.kv_pages
        pages = {}
        for name in ("acme", "beta", "one"):
            hashes = hash_pages(PROMPT, PAGE_SIZE, tenants.salt(revision, named(name).cache_scope))
            pages[name] = [held[page_hash] for page_hash in hashes]
        assert len(set(itertools.chain(*pages.values()))) == 3 * len(hashes)
        for page, twin in zip(pages["acme"], pages["beta"], strict=True):
            assert torch.equal(pool[page], pool[twin])
