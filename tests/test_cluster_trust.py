"""Who may call whom inside a deployment: a shared secret, mutual TLS, and the operator's own token."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import admin_token
from cluster.admin_service import start_admin_server
from penstock.async_client import AsyncClient
from penstock.client_auth import ClientTls
from penstock.config import RouterConfig, WorkerConfig, parse, with_secret_file
from penstock.errors import ConfigError, PermissionDenied, Unauthenticated, Unavailable
from penstock.grpc_server import make_channel
from penstock.secret import ClusterSecret, digest_of, make_api_key
from penstock.security_config import SecurityConfig, TlsConfig
from penstock.trust import ADMIN, PEER, Trust
from penstock.types import Role
from penstock.v1 import admin_pb2, admin_pb2_grpc, peer_pb2, worker_pb2, worker_pb2_grpc
from router.identity import CANARY
from tests.router_fakes import MODEL, FakeWorker, all_followed, running_router, until
from tests.serving import worker_config, workers

SECRET = ClusterSecret("s" * 40)
TOKENS = {
    "nothing": None,
    "another deployment's": ClusterSecret("t" * 40).token(PEER),
    "a tenant's key": make_api_key(),
}
TIMEOUT_S = 10.0


async def refusal(address: str, service: str, method, token: str | None) -> grpc.StatusCode:
    """How a call of this method ends that shows only this token."""
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
    """Both kinds of worker and a router over them."""
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


async def test_workers_serve_their_own_deployment_and_refuse_everybody_else():
    names = worker_pb2.DESCRIPTOR.services_by_name
    async with pair({"secret": SECRET.reveal()}) as (servers, router):
        await answer(router)
        for server in servers:
            own = names["PrefillWorker" if server.role is Role.PREFILL else "DecodeWorker"]
            await check_closed(server.address, names["Worker"], own)
            async with make_channel(server.address) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        peers = peer_pb2.DESCRIPTOR.services_by_name["RouterPeer"]
        await check_closed(router.server.fleet.peers.address, peers)


async def test_a_router_without_the_secret_gets_nowhere_and_says_so(caplog):
    config = worker_config(Role.DECODE, MODEL).model_copy(
        update={"security": SecurityConfig.model_validate({"secret": SECRET.reveal()})}
    )
    async with workers(config) as (server,):
        async with running_router(wait=False, workers=[server.address]):
            await until(lambda: "takes the deployment's own tokens alone" in caplog.text)
    assert {record.levelname for record in caplog.records if "own tokens alone" in record.message} == {"WARNING"}


async def test_the_admin_service_opens_to_the_operator_and_its_membership_to_peers():
    class Controller:
        def status(self) -> admin_pb2.StatusResponse:
            return admin_pb2.StatusResponse(model="m")

        async def watch_membership(self, router):
            yield admin_pb2.Membership(version=3)

    trust = Trust(SecurityConfig.model_validate({"secret": SECRET.reveal()}))
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


def test_the_admin_token_is_left_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = admin_token.token_file(50052)
    admin_token.leave_token(50052, "first")
    path.chmod(0o644)
    admin_token.leave_token(50052, "second")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert admin_token.find_token("localhost:50052") == "second"
    assert admin_token.find_token("127.0.0.1:50053") == admin_token.find_token("example.com:50052") == ""
    admin_token.remove_token(50052)
    assert not path.exists()


def test_a_secret_file_is_read_and_checked(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a" * 64 + "\n")
    path.chmod(0o640)
    config = with_secret_file(parse(RouterConfig, {"model": "m"}), str(path))
    assert ClusterSecret.of(config.security).reveal() == "a" * 64
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="everybody may read it"):
        ClusterSecret.of(config.security)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has 5 characters; give at least 32") as caught:
        ClusterSecret.of(config.security)
    assert "short" not in caught.value.message
    assert (
        ClusterSecret.of(parse(WorkerConfig, {"worker_id": "w", "role": "decode", "engine": {"model": "m"}}).security)
        is None
    )


def test_secrets_are_unguessable_and_each_use_has_its_own_key():
    secrets = {ClusterSecret.make().reveal() for _ in range(50)}
    assert len(secrets) == 50
    assert {len(bytes.fromhex(secret)) for secret in secrets} == {32}
    keys = {SECRET.token(use) for use in (PEER, ADMIN, CANARY, "page salts")}
    assert len(keys) == 4
    assert SECRET.reveal() not in keys


class Authority:
    """A certificate authority in a folder, by the openssl program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run("req", "-x509", *self._new_key("ca"), "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
        self.ca = str(folder / "ca.pem")

    def issue(self, name: str, alternatives: str = "") -> TlsConfig:
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternatives}\n" if alternatives else "basicConstraints=CA:FALSE\n")
        self._run("req", *self._new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        self._run("x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", extensions.name, "-out", f"{name}.pem")
        return TlsConfig(cert_file=str(self.folder / f"{name}.pem"), key_file=str(self.folder / f"{name}.key"))

    def _new_key(self, name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


@pytest.fixture(name="authority", scope="module")
def _authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def client_tls(authority: Authority, shown: TlsConfig | None = None) -> ClientTls:
    return ClientTls(authority.ca, shown and shown.cert_file, shown and shown.key_file)


async def test_mutual_tls_between_all_processes(authority):
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


async def test_both_fronts_speak_tls_and_a_certificate_is_a_tenant(authority):
    server = authority.issue("router", "DNS:localhost,IP:127.0.0.1")
    acme, nobody = authority.issue("acme", "DNS:acme.example"), authority.issue("nobody")
    key = make_api_key()
    worker = await FakeWorker().start()
    async with running_router(
        worker,
        tls=server.model_copy(update={"ca_file": authority.ca}).model_dump(),
        tenants={"acme": {"subjects": ["acme.example"]}, "beta": {"keys": [digest_of(key)]}},
        security={"secret": SECRET.reveal()},
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
    async def get(*shown: TlsConfig) -> str:
        command = ["curl", "-sS", "--cacert", authority.ca, router.http_url.replace("http:", "https:") + "/v1/models"]
        for one in shown:
            command += ["--cert", one.cert_file, "--key", one.key_file]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        return (await asyncio.wait_for(process.communicate(), TIMEOUT_S))[0].decode()

    assert '"penstock-tiny"' in await get(acme)
    assert "belong to no tenant" in await get(nobody)
    assert "curl:" in await get()


async def check_control_port(router, key: str) -> None:
    """Without TLS, on loopback, and for whoever supervises the router alone."""
    address = f"127.0.0.1:{router.server.ports.control}"
    for api_key in ("", key):
        async with AsyncClient(address, api_key=api_key) as client:
            with pytest.raises(Unauthenticated):
                await client.complete("x", max_tokens=1)
    async with AsyncClient(address, api_key=SECRET.token(CANARY)) as client:
        await client.complete("x", max_tokens=1)
