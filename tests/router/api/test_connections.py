"""Tests the limits of connections to the public ports over real sockets: number, speed, idle time, control traffic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket

import grpc
import httpx
import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import DeadlineExceeded, Overloaded, from_rpc_error
from penstock.process.setup import raise_file_limit
from penstock.v1 import inference_pb2
from router.api.grpc.flood_guard import ConnectionAccounts, Traffic
from router.api.http.connections import connections_for, peer_of
from tests.router.api.test_grpc_service import failure
from tests.support.router.router_fakes import FakeWorker, running_router, until
from tests.support.router.small_sockets import connect_small, shrink_sent_buffers

LIST_MODELS = "/penstock.v1.Inference/ListModels"


@contextlib.asynccontextmanager
async def router_with(**limits):
    async with running_router(await FakeWorker().start(), limits=limits) as router:
        yield router


@contextlib.asynccontextmanager
async def connected(router, port="http"):
    reader, writer = await asyncio.open_connection("127.0.0.1", getattr(router.server.ports, port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader):
    """Returns status, headers and error of an answer that ends its connection."""
    async with asyncio.timeout(60.0):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), json.loads(body)["error"]


async def outlast_header_timeout(router):
    """Returns once a header timer that was started before this call would have fired: a later one has."""
    async with connected(router) as (reader, _):
        assert (await answer(reader))[0] == 408


def count_of(router, limit):
    rendered = router.server._metrics.render().decode()
    return rendered.count(f'penstock:limited_total{{limit="{limit}",model_name="penstock-tiny"}}')


@pytest.mark.parametrize(("limit", "status"), [("connections", 503), ("connections_per_peer", 429)])
async def test_one_connection_too_many_is_refused(limit, status):
    async with router_with(**{limit: 2}) as router:
        async with connected(router), connected(router) as (_, second):
            async with connected(router) as (reader, _):
                got, headers, error = await answer(reader)
            assert (got, headers["connection"], headers["retry-after"]) == (status, "close", "1")
            assert f"limits.{limit}" in error["message"]
            assert count_of(router, limit) == 1
            second.close()
            await until(lambda: router.server.connections.num_open == 1)
            async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
                assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: "])
async def test_headers_that_never_arrive_time_out(sent):
    async with router_with(header_timeout_s=0.2) as router, connected(router) as (reader, writer):
        writer.write(sent)
        status, _, error = await answer(reader)
        assert (status, error["param"]) == (408, "headers")
        assert "did not arrive within 0.2 s" in error["message"]
        assert count_of(router, "header_timeout_s") == 1
        await until(lambda: not router.server.connections.num_open)


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"GET /health HTTP/1.1\r\nx: " + b"x" * 5000, 431, "headers: are too long; send 1024 bytes or fewer"),
        (b"GET /health\r\n\r\n", 400, "request: is not valid HTTP/1.1"),
    ],
)
async def test_requests_that_cannot_be_parsed_get_errors_like_others(sent, status, message):
    async with router_with(header_bytes=1024) as router, connected(router) as (reader, writer):
        writer.write(sent)
        got, headers, error = await answer(reader)
        assert (got, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
        assert (error["param"], error["type"]) == (message.partition(":")[0], "invalid_request_error")
        assert error["message"].startswith(message)
        assert count_of(router, "header_bytes") == (status == 431)
        await until(lambda: not router.server.connections.num_open)


async def test_a_request_with_two_lengths_is_refused_at_once_and_ends_its_connection():
    """Nothing that follows on the connection is taken for a request, whichever length the sender meant."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    async with router_with() as router, connected(router) as (reader, writer):
        writer.write(head + b"0\r\n\r\nGET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers, error = await answer(reader)
        assert (status, headers["connection"], error["param"]) == (400, "close", "headers")
        assert "send one of them" in error["message"]
        await until(lambda: not router.server.connections.num_open)
    async with router_with() as router, connected(router) as (reader, writer):
        writer.write(head)  # no body at all
        assert (await answer(reader))[0] == 400


async def test_headers_of_a_later_request_time_out_too():
    async with router_with(header_timeout_s=0.2) as router, connected(router) as (reader, writer):
        for _ in range(2):  # an idle connection is not a slow one
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n")
            await reader.readuntil(b'{"status":"live"}')
            await outlast_header_timeout(router)
        writer.write(b"GET ")
        assert (await answer(reader))[0] == 408


async def test_a_slow_answer_does_not_count_as_slow_headers():
    worker = await FakeWorker(pause_at=0).start()
    async with running_router(worker, limits={"header_timeout_s": 0.2}) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
            await worker.until(lambda fake: bool(fake.submits))
            await outlast_header_timeout(router)
            worker.resume.set()
            assert (await call).status_code == 200


async def test_an_idle_connection_is_closed():
    async with router_with(idle_timeout_s=1.0) as router, connected(router) as (reader, writer):
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60.0):
            assert b"200 OK" in await reader.read()


async def test_a_closed_connection_ends_although_its_answer_is_not_read(monkeypatch):
    """The answer is complete and larger than the sockets hold, so the connection would wait for its reader."""
    shrink_sent_buffers(monkeypatch)
    worker = await FakeWorker(tokens_per_frame=500).start()
    async with running_router(worker, limits={"write_stall_s": 0.5, "idle_timeout_s": 1.0}) as router:
        body = {"prompt": "x", "max_tokens": 1000, "logprobs": 20}
        raw = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
        with socket.socket() as client:
            await connect_small(client, router.server.ports.http)
            await asyncio.get_running_loop().sock_sendall(client, head + raw)
            await worker.until(lambda fake: bool(fake.submits))
            await until(lambda: not router.server.connections.num_open)


async def test_grpc_refuses_connections_and_calls_beyond_their_limits():
    async with router_with(connections=2, calls=3) as router:
        request = inference_pb2.ListModelsRequest()
        options = [("grpc.use_local_subchannel_pool", 1)]
        await router.stub.ListModels(request)  # the first connection
        async with grpc.aio.insecure_channel(router.grpc_address, options=options) as second:
            await second.unary_unary(LIST_MODELS)(b"", timeout=60.0)
            async with grpc.aio.insecure_channel(router.grpc_address, options=options) as third:
                with pytest.raises(grpc.RpcError) as caught:
                    await third.unary_unary(LIST_MODELS)(b"", timeout=60.0)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            silent = [second.stream_unary(LIST_MODELS)() for _ in range(3)]  # calls without a message
            for call in silent:
                await call.wait_for_connection()
            error = await eventually_refused(router)
            assert isinstance(error, Overloaded)
            assert "Concurrent RPC limit exceeded" in error.message
            for call in silent:
                call.cancel()


async def eventually_refused(router):
    """Returns the refusal; the server may still be accepting the calls that fill it."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                await router.stub.ListModels(inference_pb2.ListModelsRequest())
            except grpc.RpcError as error:
                return from_rpc_error(error)


async def test_a_grpc_message_that_never_arrives_times_out():
    async with router_with(body_timeout_s=0.2) as router:
        for method in ("Generate", "Route", "Tokenize", "ListModels"):
            error = await failure(router.channel.stream_unary(f"/penstock.v1.Inference/{method}")())
            assert isinstance(error, DeadlineExceeded)
            assert error.message.startswith("request: did not arrive within 0.2 s")
        assert count_of(router, "body_timeout_s") == 1


async def test_a_grpc_connection_without_a_handshake_is_closed():
    async with router_with(header_timeout_s=0.2) as router, connected(router, "grpc") as (reader, _):
        async with asyncio.timeout(60.0):
            await reader.read()


@pytest.mark.parametrize("limits", [{"idle_timeout_s": 0.5}, {"connection_age_s": 0.5}])
async def test_idle_and_old_grpc_connections_end_and_clients_reconnect(limits):
    async with router_with(**limits) as router:
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            await channel.unary_unary(LIST_MODELS)(b"", timeout=60.0)
            async with asyncio.timeout(60.0):
                while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
            await channel.unary_unary(LIST_MODELS)(b"", timeout=60.0, wait_for_ready=True)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"


async def test_a_flood_of_pings_ends_its_connection():
    async with router_with(ping_strikes=4) as router, connected(router, "grpc") as (reader, writer):
        writer.write(PREFACE + 20 * PING)
        async with asyncio.timeout(60.0):
            with contextlib.suppress(ConnectionError):
                await reader.read()  # ends


def test_peer_addresses_are_parsed():
    assert peer_of("10.0.0.7") == peer_of("::ffff:10.0.0.7") == "10.0.0.7"
    assert peer_of("2001:db8:1:2::1") == peer_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert peer_of("2001:db8:1:3::1") != peer_of("2001:db8:1:2::1")


def test_connections_leave_file_descriptors_for_the_rest(caplog):
    limits = LimitsConfig()
    assert connections_for(1 << 20, limits) == limits.connections
    assert not caplog.messages
    assert connections_for(1024, limits) == 256
    assert caplog.messages == [
        "the limit of 1024 open files allows 256 connections to each port, less than limits.connections = 8192; "
        "raise it (ulimit -Hn)"
    ]


def test_the_limit_of_open_files_is_raised_and_logged(caplog):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        with caplog.at_level(logging.INFO):
            assert raise_file_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert caplog.messages == [f"open files: raised the limit from {before[1] // 2} to {before[1]}"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_flood_of_pings_without_a_pause_ends_its_connection():
    """The library ends a connection only between two writes, and this flood leaves no such moment."""
    async with router_with() as router:
        num_files = len(os.listdir("/proc/self/fd"))
        async with connected(router, "grpc") as (reader, writer), asyncio.timeout(60.0):
            writer.write(PREFACE)
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(500 * PING)
                    await asyncio.gather(writer.drain(), reader.read(500 * len(PING)))
        await until(lambda: len(os.listdir("/proc/self/fd")) <= num_files)  # the server's end is closed too


def test_a_connection_may_send_what_its_calls_need():
    limits = LimitsConfig(request_bytes=1 << 20, header_bytes=1024, control_bytes_per_s=1024)
    accounts = ConnectionAccounts(limits)

    def after_looks(open_now: dict[int, Traffic], now_s: float) -> list[int]:
        """Returns the excessive connections at the fourth look, and checks that earlier looks find none."""
        accounts.find_excessive(dict.fromkeys(open_now, Traffic(0, 0)), now_s)
        assert not any(accounts.find_excessive(open_now, now_s) for _ in range(3))
        return accounts.find_excessive(open_now, now_s)

    assert after_looks({7: Traffic(128 << 10, 0), 8: Traffic(0, 0)}, 0.0) == []
    assert after_looks({7: Traffic(130 << 10, 0), 8: Traffic(129 << 10, 0)}, 1.0) == [7]
    assert after_looks({7: Traffic(130 << 10, 4096), 8: Traffic(129 << 10, 0)}, 1.0) == []  # answers
    accounts.on_call("ipv4:127.0.0.1:7", 1.0)
    accounts.on_call("ipv6:%5B::1%5D:9", 1.0)
    accounts.on_call("unix:/tmp/socket", 1.0)
    assert after_looks({7: Traffic(1 << 20, 0), 8: Traffic(1 << 20, 0)}, 1.0) == [8]
    assert after_looks({7: Traffic(3 << 20, 0)}, 1.0) == [7]
    for _ in range(2):
        assert accounts.find_excessive({}, 2.0) == []
    assert after_looks({7: Traffic(1 << 20, 0)}, 3.0) == [7]  # another connection of the same port
