"""Tests a running router whose tenants, metrics token and certificates are replaced: new calls, and running streams."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from penstock.client.async_client import AsyncClient
from penstock.client.auth import ClientTls
from penstock.config import RouterConfig, parse
from penstock.errors import ConfigError, Unauthenticated
from penstock.rpc.secret import digest_of, make_api_key
from tests.support.key_files import Authority, replace
from tests.support.router.router_fakes import FakeWorker, running_router, until

WITHIN_S = 60.0  # in which a busy machine has time to look at the files
OLD, NEW = make_api_key(), make_api_key()


def table(**keys: str) -> str:
    return "".join(f'[tenants.{name}]\nkeys = ["{digest_of(key)}"]\n' for name, key in keys.items())


async def eventually(condition: Callable[[], object]) -> None:
    """Waits until the awaitable that `condition` makes is true."""
    limit_s = time.monotonic() + WITHIN_S
    while not await condition():
        assert time.monotonic() < limit_s
        await asyncio.sleep(0.02)


async def is_known(address: str, key: str) -> bool:
    async with AsyncClient(address, api_key=key, timeout_s=60.0) as client:
        try:
            await client.tokenize("x")
        except Unauthenticated:
            return False
    return True


async def test_a_revoked_key_is_refused_while_its_running_stream_completes(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    replace(path, table(acme=OLD))
    worker = await FakeWorker(pause_at=2).start()
    async with running_router(worker, tenants_file=str(path)) as router:
        async with AsyncClient(router.grpc_address, api_key=OLD, timeout_s=100.0) as client:
            stream = client.generate([1, 2, 3], max_tokens=6, ignore_eos=True)
            tokens = list((await anext(stream)).token_ids)
            assert not await is_known(router.grpc_address, NEW)
            replace(path, table(acme=NEW))
            await eventually(lambda: is_known(router.grpc_address, NEW))
            assert not await is_known(router.grpc_address, OLD)
            headers = {"authorization": f"Bearer {OLD}"}
            async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
                assert (await http.get("/v1/models", headers=headers)).status_code == 401
            worker.resume.set()
            async for output in stream:
                tokens += output.token_ids
            assert len(tokens) == 6
            with pytest.raises(Unauthenticated):
                await client.complete([1, 2, 3], max_tokens=1)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "[tenants]\n",
        "[tenants.acme]\nkey = 3\n",
        "not toml",
        "a = " + "[" * 100_000,
        table(a=OLD) + table(b=OLD),
    ],
    ids=["empty", "without tenants", "misspelt", "no TOML", "too deep", "one key twice"],
)
async def test_a_bad_tenants_file_is_refused_and_never_opens_the_router(tmp_path: Path, bad: str) -> None:
    path, token = tmp_path / "tenants.toml", tmp_path / "token"
    replace(path, table(acme=OLD))
    replace(token, "scrape-me-please")
    async with running_router(
        await FakeWorker().start(), tenants_file=str(path), metrics_token_file=str(token)
    ) as router:
        async with httpx.AsyncClient(
            base_url=router.http_url, timeout=60, headers={"authorization": "Bearer scrape-me-please"}
        ) as http:

            async def refused() -> bool:
                text = (await http.get("/metrics")).text
                assert 'penstock:credentials_age_seconds{model_name="penstock-tiny",setting="tenants_file"}' in text
                return 'credentials_refused{model_name="penstock-tiny",setting="tenants_file"} 1.0' in text

            assert not await refused()
            replace(path, bad)
            await eventually(refused)
            assert await is_known(router.grpc_address, OLD)
            for stranger in ("", NEW):
                assert not await is_known(router.grpc_address, stranger)


async def test_the_metrics_token_is_replaced(tmp_path: Path) -> None:
    token = tmp_path / "token"
    replace(token, "first")
    async with running_router(await FakeWorker().start(), metrics_token_file=str(token)) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:

            async def opens(shown: str) -> bool:
                return (await http.get("/metrics", headers={"authorization": f"Bearer {shown}"})).status_code == 200

            assert await opens("first")
            replace(token, "second")
            await eventually(lambda: opens("second"))
            assert not await opens("first")


def test_tenants_come_from_either_the_file_or_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"tenants_file = 't.toml' and tenants are both set; give one"):
        parse(RouterConfig, {"model": "m", "tenants_file": "t.toml", "tenants": {"acme": {}}})


async def test_certificates_are_renewed_under_running_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The new certificate is another authority's, so that a client's trust shows which one was presented."""
    authorities = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        authorities.append(Authority(tmp_path / name))
    old, new = (each.issue("router", "DNS:localhost,IP:127.0.0.1") for each in authorities)
    client_old, client_new = (each.issue("client", "DNS:acme.example") for each in authorities)
    used = {name: str(tmp_path / f"{name}.pem") for name in ("cert_file", "key_file", "ca_file")}

    def put(**paths: str) -> None:
        for name, path in paths.items():
            replace(used[name], Path(path).read_text())

    put(cert_file=old.cert_file, key_file=old.key_file, ca_file=authorities[0].ca)
    worker = await FakeWorker(pause_at=2).start()
    async with running_router(worker, tls=used) as router:

        async def trusts(number: int) -> tuple[bool, bool]:
            """Returns whether gRPC and HTTP accept the authority's clients and are accepted by them."""
            own = (client_old, client_new)[number]
            tls = ClientTls(authorities[number].ca, own.cert_file, own.key_file)
            async with AsyncClient(router.grpc_address, tls=tls, timeout_s=60.0) as client:
                try:
                    await client.tokenize("x")
                    grpc_trusts = True
                except ConfigError:
                    grpc_trusts = False
            context = ssl.create_default_context(cafile=authorities[number].ca)
            context.load_cert_chain(own.cert_file, own.key_file)
            async with httpx.AsyncClient(verify=context, timeout=60) as http:
                try:
                    url = router.http_url.replace("http:", "https:")
                    http_trusts = (await http.get(f"{url}/v1/models")).status_code == 200
                except httpx.TransportError:
                    http_trusts = False
            return grpc_trusts, http_trusts

        assert [await trusts(0), await trusts(1)] == [(True, True), (False, False)]
        tls = ClientTls(authorities[0].ca, client_old.cert_file, client_old.key_file)
        async with AsyncClient(router.grpc_address, tls=tls, timeout_s=100.0) as client:
            stream = client.generate([1, 2, 3], max_tokens=6, ignore_eos=True)
            tokens = list((await anext(stream)).token_ids)
            put(cert_file=new.cert_file)  # the new certificate's key is still missing
            await until(lambda: "the previous content stays in force (tls)" in caplog.text, WITHIN_S)
            assert await trusts(0) == (True, True)
            put(key_file=new.key_file, ca_file=authorities[1].ca)
            await eventually(lambda: _is((True, True), trusts(1)))
            assert await trusts(0) == (False, False)
            worker.resume.set()
            async for output in stream:
                tokens += output.token_ids
            assert len(tokens) == 6


async def _is(wanted: object, found: object) -> bool:
    return await found == wanted  # type: ignore[misc]
