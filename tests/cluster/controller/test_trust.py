"""Tests who may call which service of a deployment: by shared secret, mutual TLS and the operator's own token."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.controller.admin_service import start_admin_server
from penstock.client.async_client import AsyncClient
from penstock.client.auth import ClientTls
from penstock.config import RouterConfig, load_process
from penstock.config.security import SecurityConfig, TlsConfig
from penstock.errors import ConfigError, PermissionDenied, Unauthenticated, Unavailable
from penstock.rpc import admin_token
from penstock.rpc.secret import ADMIN, PEER, ClusterSecret, ClusterSecrets, digest_of, make_api_key
from penstock.rpc.server import make_channel
from penstock.rpc.trust import Trust
from penstock.types import Role
from penstock.v1 import admin_pb2, admin_pb2_grpc, peer_pb2, worker_pb2, worker_pb2_grpc
from router.api.identity import CANARY
from tests.support.key_files import Authority, write_secret
from tests.support.router.router_fakes import MODEL, FakeWorker, all_followed, running_router, until
from tests.support.serving import worker_config, workers

SECRET = ClusterSecret("s" * 40)
TOKENS = {
    "nothing": None,
    "another deployment's": ClusterSecret("t" * 40).token(PEER),
    "a tenant's key": make_api_key(),
}
TIMEOUT_S = 60.0


async def refusal(address: str, service: str, method, token: str | None) -> grpc.StatusCode:
    """Returns the status of a call of this method with only this token."""
    async with make_channel(address) as channel:
        path = f"/{service}/{method.name}"
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        kinds = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        begin = kinds[method.client_streaming, method.server_streaming](path)
        call = begin(*(() if method.client_streaming else (b"",)), metadata=metadata, timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as caught:
            await (call.read() if method.server_streaming else call)
        return caught.value.code()


async def check_closed(address: str, *services, tokens=TOKENS) -> None:
    for service in services:
        assert service.methods
        for method in service.methods:
            for whose, token in tokens.items():
                code = await refusal(address, service.full_name, method, token)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (method.name, whose, code)


@contextlib.asynccontextmanager
async def pair(security: dict[str, object]):
    """Yields a prefill worker, a decode worker and a router over them."""
    configs = [
        worker_config(role, MODEL).model_copy(update={"security": SecurityConfig.model_validate(security)})
        for role in Role
    ]
    async with workers(*configs) as servers:
        addresses = [server.address for server in servers]
        async with running_router(wait=False, workers=addresses, security=security) as router:
            await until(lambda: all_followed(router.server, 2), timeout_s=TIMEOUT_S)
            yield servers, router


async def answer(router) -> None:
    async with AsyncClient(router.grpc_address) as client:
        result = await client.complete(list(range(300, 364)), max_tokens=3, ignore_eos=True)
    assert result.timing.prefill_worker == "prefill"
    assert result.timing.pages_moved > 0


async def test_workers_serve_their_own_deployment_and_refuse_other_callers(tmp_path):
    names = worker_pb2.DESCRIPTOR.services_by_name
    async with pair(write_secret(tmp_path / "secret", SECRET)) as (servers, router):
        await answer(router)
        for server in servers:
            own = names["PrefillWorker" if server.role is Role.PREFILL else "DecodeWorker"]
            await check_closed(server.address, names["Worker"], own)
            async with make_channel(server.address) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        peers = peer_pb2.DESCRIPTOR.services_by_name["RouterPeer"]
        await check_closed(router.server.fleet.peers.address, peers)


async def test_a_router_without_the_secret_is_refused_and_logs_it(caplog, tmp_path):
    config = worker_config(Role.DECODE, MODEL).model_copy(
        update={"security": SecurityConfig.model_validate(write_secret(tmp_path / "secret", SECRET))}
    )
    async with workers(config) as (server,):
        async with running_router(wait=False, workers=[server.address]):
            await until(lambda: "accepts only the deployment's own tokens" in caplog.text)
    assert {record.levelname for record in caplog.records if "only the deployment's own tokens" in record.message} == {
        "WARNING"
    }


async def test_the_admin_service_is_open_to_the_operator_and_its_membership_to_peers(tmp_path):
    class Membership:
        async def watch(self, router):
            yield admin_pb2.Membership(version=3)

    class Controller:
        membership = Membership()

        def status(self) -> admin_pb2.StatusResponse:
            return admin_pb2.StatusResponse(model="m")

    trust = Trust(SecurityConfig.model_validate(write_secret(tmp_path / "secret", SECRET)))
    server, address = await start_admin_server(Controller(), "127.0.0.1", 0, trust)
    try:
        service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
        await check_closed(address, service)
        for method in service.methods:
            if method.name not in ("WatchMembership", "ReportDemand"):  # routers call these
                tokens = {"a peer's": SECRET.token(PEER), "the controller's own": SECRET.token(CANARY)}
                for token in tokens.values():
                    assert await refusal(address, service.full_name, method, token) is grpc.StatusCode.UNAUTHENTICATED
        async with trust.channel(address) as channel:
            watch = admin_pb2_grpc.AdminStub(channel).WatchMembership(admin_pb2.WatchMembershipRequest())
            assert (await watch.read()).version == 3
        async with make_channel(address) as channel:
            metadata = (("authorization", f"Bearer {SECRET.token(ADMIN)}"),)
            status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), metadata=metadata)
            assert status.model == "m"
    finally:
        await server.stop()


def test_only_its_owner_can_read_the_admin_token_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = admin_token.token_file(50052)
    admin_token.leave_token(path, "first")
    path.chmod(0o644)
    admin_token.leave_token(path, "second")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert admin_token.find_token("localhost:50052") == "second"
    assert admin_token.find_token("127.0.0.1:50053") == admin_token.find_token("example.com:50052") == ""
    admin_token.remove_token(path)
    assert not path.exists()


def test_a_secret_file_is_read_and_checked(tmp_path):
    path, config = tmp_path / "secret", tmp_path / "router.json"
    path.write_text("a" * 64 + "\n" + "b" * 64 + "\n")
    path.chmod(0o640)
    config.write_text('{"model": "m"}')
    security = load_process(RouterConfig, config, str(path)).security
    secrets = ClusterSecrets.of(security)
    assert (secrets.current.reveal(), [each.reveal()[0] for each in secrets.accepted]) == ("a" * 64, ["a", "b"])
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="everybody may read it"):
        ClusterSecrets.of(security)
    path.chmod(0o600)
    for text, problem in (
        ("short", "has 5 characters; give at least 32"),
        ("a" * 64 + "\nshort", "has 5 characters"),
        ("", "has 0 lines; give the secret"),
        (f"{'short' * 9}\n" * 3, "has 3 lines"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem) as caught:
            ClusterSecrets.of(security)
        assert str(path) in caught.value.message
        assert "short" not in caught.value.message.replace("short enough", "")
    assert ClusterSecrets.of(load_process(RouterConfig, config, None).security) is None


def test_secrets_are_random_and_each_use_has_its_own_key():
    secrets = {ClusterSecret.make().reveal() for _ in range(50)}
    assert len(secrets) == 50
    assert {len(bytes.fromhex(secret)) for secret in secrets} == {32}
    keys = {SECRET.token(use) for use in (PEER, ADMIN, CANARY, "page salts")}
    assert len(keys) == 4
    assert SECRET.reveal() not in keys


@pytest.fixture(name="authority", scope="module")
def _authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def client_tls(authority: Authority, shown: TlsConfig | None = None) -> ClientTls:
    return ClientTls(authority.ca, shown and shown.cert_file, shown and shown.key_file)


async def test_mutual_tls_works_between_all_processes(authority):
    own = authority.issue("penstock", "DNS:penstock")
    tls = own.model_copy(update={"ca_file": authority.ca, "server_name": "penstock"}).model_dump()
    root = Path(authority.ca).read_bytes()  # noqa: ASYNC240
    async with pair({"tls": tls}) as (servers, router):
        await answer(router)
        for options in ([], [("grpc.ssl_target_name_override", "penstock")]):
            credentials = grpc.ssl_channel_credentials(root)
            async with make_channel(servers[0].address, credentials, options) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=TIMEOUT_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_grpc_and_http_use_tls_and_a_certificate_names_a_tenant(authority, tmp_path):
    server = authority.issue("router", "DNS:localhost,IP:127.0.0.1")
    acme, nobody = authority.issue("acme", "DNS:acme.example"), authority.issue("nobody")
    key = make_api_key()
    worker = await FakeWorker().start()
    async with running_router(
        worker,
        tls=server.model_copy(update={"ca_file": authority.ca}).model_dump(),
        tenants={"acme": {"subjects": ["acme.example"]}, "beta": {"keys": [digest_of(key)]}},
        security=write_secret(tmp_path / "secret", SECRET),
        metrics_port=0,
    ) as router:

        async def tenant(shown: TlsConfig | None, api_key: str = "") -> bytes:
            tls = client_tls(authority, shown)
            async with AsyncClient(router.grpc_address, api_key=api_key, tls=tls, timeout_s=TIMEOUT_S) as client:
                await client.complete("x", max_tokens=1)
            return worker.submits[-1].salt

        salts = [await tenant(acme), await tenant(nobody, key)]
        assert len(set(salts)) == 2
        with pytest.raises(PermissionDenied, match="belong to no tenant"):
            await tenant(nobody)
        with pytest.raises(Unavailable):
            await tenant(None, key)
        await check_http(authority, router, acme, nobody)
        await check_control_port(router, key)


async def check_http(authority: Authority, router, acme: TlsConfig, nobody: TlsConfig) -> None:
    api = router.http_url.replace("http:", "https:")

    async def get(*shown: TlsConfig, url: str = f"{api}/v1/models") -> str:
        command = ["curl", "-sS", "--cacert", authority.ca, url]
        for each in shown:
            command += ["--cert", each.cert_file, "--key", each.key_file]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        return (await asyncio.wait_for(process.communicate(), TIMEOUT_S))[0].decode()

    assert '"penstock-tiny"' in await get(acme)
    assert "belong to no tenant" in await get(nobody)
    assert "curl:" in await get()
    operations = f"https://127.0.0.1:{router.server.ports.metrics}"  # open to probes, which have no certificate
    assert "ready" in await get(url=f"{operations}/health")
    assert "Not Found" in await get(url=f"{operations}/v1/models")


async def check_control_port(router, key: str) -> None:
    """Checks that the control port is on loopback, without TLS, and open only to the router's supervisor."""
    address = f"127.0.0.1:{router.server.ports.control}"
    for api_key in ("", key):
        async with AsyncClient(address, api_key=api_key) as client:
            with pytest.raises(Unauthenticated):
                await client.complete("x", max_tokens=1)
    async with AsyncClient(address, api_key=SECRET.token(CANARY)) as client:
        await client.complete("x", max_tokens=1)
