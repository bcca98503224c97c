"""Tests a deployment that supervises no router: when it is ready, where its Admin service listens, what it reports."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import grpc.aio
import pytest

from cluster.cli.commands.inspecting.doctor import check_routers_elsewhere
from cluster.cli.commands.inspecting.status import format_status
from cluster.cli.commands.running.serve import how_to_follow
from cluster.controller.admin_service import start_admin_server
from cluster.diagnose.findings import Severity
from cluster.ray.launch import resolve_ports
from penstock.config import RouterConfig, ServeConfig, parse
from penstock.errors import ConfigError
from penstock.v1 import admin_pb2, admin_pb2_grpc
from router.server import RouterServer
from tests.cluster.controller.test_controller import World
from tests.support.router.router_fakes import MODEL, running_router

TIMEOUT_S = 60.0


async def test_a_deployment_without_routers_is_ready_with_its_workers() -> None:
    world = World(routers=0)
    world.may_start.clear()
    world.controller.start()
    await world.until(lambda status: len(world.processes) == 3)
    assert not world.controller.is_ready
    world.may_start.set()
    status = await world.until(lambda status: status.ready)
    assert [worker.member.role for worker in status.workers] == ["prefill", "decode", "decode"]
    assert (world.num_canaries, list(status.endpoints)) == (0, [])
    assert world.records[-1].was_ready
    for name in ("decode-0", "decode-1"):  # without a decode worker nobody can be served
        world.may_start.clear()
        world.processes[name, 1].lose()
    await world.until(lambda status: not status.ready)
    world.may_start.set()
    await world.until(lambda status: status.ready)
    await world.controller.stop()


async def test_the_status_lists_the_routers_that_follow() -> None:
    world = World(routers=0)
    await world.ready()
    server, address = await start_admin_server(world.controller, "127.0.0.1", 0)
    assert "no router follows it" in format_status(world.controller.status())
    assert check_routers_elsewhere(world.controller.status()).severity is Severity.PROBLEM
    async with running_router(wait=False, admin=SimpleNamespace(address=address)) as router:
        peer = router.server.fleet.peers.address
        status = await world.until(lambda status: list(status.routers_elsewhere) == [peer])
        assert "at the addresses of routers elsewhere" in format_status(status)
        (row,) = [line.split() for line in format_status(status).splitlines() if line.startswith("router")]
        assert row == ["router", "elsewhere", "-", "-", "-", "-", "-", peer]
        assert check_routers_elsewhere(status).severity is Severity.OK
    await world.until(lambda status: not status.routers_elsewhere)
    await world.controller.stop()
    await server.stop()


async def test_supervised_routers_are_not_listed_as_elsewhere() -> None:
    world = World(routers=1)
    membership = world.controller.membership
    watches = [membership.watch(peer) for peer in ("router-0:3", "10.0.0.9:1")]
    for watch in watches:
        await anext(watch)
    world.may_start.clear()
    world.controller.start()
    await world.until(lambda status: len(world.processes) == 4)
    assert not world.controller.status().routers_elsewhere  # which of them is supervised is not yet known
    world.may_start.set()
    status = await world.until(lambda status: status.ready)
    assert list(status.routers_elsewhere) == ["10.0.0.9:1"]
    assert "no router follows it" not in format_status(status)
    await watches[1].aclose()
    assert not world.controller.status().routers_elsewhere
    await watches[0].aclose()
    await world.controller.stop()


async def test_a_router_keeps_the_last_membership_without_its_admin_service() -> None:
    world = World(routers=0)
    await world.ready()
    async with contextlib.AsyncExitStack() as stack:
        server, address = await start_admin_server(world.controller, "127.0.0.1", 0)
        router = await stack.enter_async_context(running_router(wait=False, admin=SimpleNamespace(address=address)))
        await world.until(lambda status: len(status.routers_elsewhere) == 1)
        async with asyncio.timeout(TIMEOUT_S):
            while len(router.server.fleet.followers) != 3:
                await router.server.fleet.wait_change()
        await server.stop()
        await world.until(lambda status: not status.routers_elsewhere)
        assert len(router.server.fleet.followers) == 3
        again, _ = await start_admin_server(world.controller, "127.0.0.1", int(address.rpartition(":")[2]))
        stack.push_async_callback(again.stop)
        await world.until(lambda status: len(status.routers_elsewhere) == 1)
    await world.controller.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "127.0.0.2"])
async def test_the_admin_service_is_found_on_loopback_wherever_it_listens(host: str) -> None:
    world = World(routers=0)
    server, address = await start_admin_server(world.controller, host, 0)
    assert address.startswith("127.0.0.1:")
    addresses = {address, f"{'127.0.0.3' if host == '0.0.0.0' else host}:{address.rpartition(':')[2]}"}
    for each in addresses:
        async with grpc.aio.insecure_channel(each) as channel:
            await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
    await server.stop()


def test_an_admin_service_beyond_loopback_needs_a_secret() -> None:
    data = {"model": "m", "routers": 0, "admin_host": "0.0.0.0"}
    with pytest.raises(ConfigError) as caught:
        parse(ServeConfig, data)
    assert "admin_host = '0.0.0.0' is beyond loopback, and without a secret" in caught.value.message
    assert "set security.secret_file" in caught.value.message
    assert parse(ServeConfig, {**data, "security": {"secret_file": "s"}}).admin_host == "0.0.0.0"


def test_a_deployment_without_routers_opens_no_public_port() -> None:
    taken = parse(ServeConfig, {"model": "m", "routers": 0, "http_port": 0, "grpc_port": 0, "admin_port": 0})
    resolved = resolve_ports(taken)
    assert (resolved.http_port, resolved.grpc_port, resolved.metrics_ports) == (0, 0, ())
    assert resolved.admin_port
    with pytest.raises(ConfigError, match="metrics_ports holds 1 ports, but routers = 0"):
        parse(ServeConfig, {"model": "m", "routers": 0, "metrics_ports": [8001]})


def test_a_router_that_others_cannot_call_is_refused() -> None:
    config = {"model": str(MODEL), "admin": "head:50052", "peer_host": "0.0.0.0", "security": {"insecure": True}}
    with pytest.raises(ConfigError) as caught:
        RouterServer(parse(RouterConfig, config))
    assert "peer_host = '0.0.0.0'" in caught.value.message
    assert "give the address of this machine (--peer-host)" in caught.value.message


def test_serve_prints_the_address_that_routers_follow() -> None:
    text = how_to_follow("127.0.0.1:50052", "10.0.0.7")
    assert 'admin = "10.0.0.7:50052"' in text
    assert "No request was sent through it" in text
    assert 'admin = "0.0.0.0' not in how_to_follow("127.0.0.1:50052", "0.0.0.0")
