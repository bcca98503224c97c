"""Tests a channel whose credentials are renewed: new calls use the new ones, running calls end with the old ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from penstock.rpc.renewed_channel import RenewedChannel
from tests.support.router.router_fakes import until


@pytest.fixture(name="address")
async def _address() -> AsyncIterator[str]:
    """Yields the address of a server that echoes its input."""

    async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def echo_once(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    server = grpc.aio.server()
    methods = {
        "Stream": grpc.stream_stream_rpc_method_handler(echo),
        "Call": grpc.unary_unary_rpc_method_handler(echo_once),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_running_calls_keep_the_channel_on_which_they_started(address: str) -> None:
    version, opened = 1, []

    def dial() -> grpc.aio.Channel:
        opened.append(grpc.aio.insecure_channel(address))
        return opened[-1]

    async with asyncio.timeout(30), RenewedChannel(dial, lambda: version) as channel:
        stream = channel.stream_stream("/Echo/Stream")()
        call = channel.unary_unary("/Echo/Call")
        await stream.write(b"1")
        assert await stream.read() == b"1"
        assert await call(b"x") == b"x"
        assert len(opened) == 1
        version = 2
        assert await call(b"y") == b"y"  # the same callable, since stubs keep it
        assert (len(opened), channel.num_open) == (2, 2)
        await stream.write(b"2")
        assert await stream.read() == b"2"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await until(lambda: channel.num_open == 1)
        await until(lambda: opened[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        version = 3
        assert await call(b"w") == b"w"
        await until(lambda: channel.num_open == 1)


async def test_closing_ends_calls_on_every_channel(address: str) -> None:
    version = 1
    channel = RenewedChannel(lambda: grpc.aio.insecure_channel(address), lambda: version)
    old = channel.stream_stream("/Echo/Stream")()
    await old.write(b"1")
    version = 2
    new = channel.stream_stream("/Echo/Stream")()
    await new.write(b"1")
    await channel.close()
    for stream in (old, new):
        assert stream.done()
    assert channel.num_open == 0
