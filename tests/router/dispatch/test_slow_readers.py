"""Tests clients that do not read their streams, over real sockets: they hold no slot, and they are disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket

import grpc
import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import DeadlineExceeded, from_rpc_error
from penstock.v1 import inference_pb2_grpc
from router.api.reader_watch import ReaderWatch
from router.metrics.metrics import RouterMetrics
from tests.router.api.test_grpc_service import collect, request
from tests.support.router.router_fakes import FakeWorker, running_router, until
from tests.support.router.small_sockets import connect_small, shrink_sent_buffers

NEVER_S = 600.0  # a limit that this test does not reach
GENEROUS_S = 15.0  # for an answer that takes a second of a core
MANY = 1600  # tokens with twenty alternatives each, many times what sockets and windows hold here
# gRPC windows that do not grow, so that a stalled reader is noticed after 64 KiB
SMALL_WINDOWS = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]


@pytest.fixture(autouse=True)
def _small_sockets(monkeypatch):
    shrink_sent_buffers(monkeypatch)


def long_answers(**settings):
    return FakeWorker(tokens_per_frame=10, **settings)


@contextlib.asynccontextmanager
async def unread_grpc(router, **fields):
    """Opens a stream and never reads it."""
    async with grpc.aio.insecure_channel(router.grpc_address, options=SMALL_WINDOWS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request("Hello", max_tokens=MANY, logprobs=20), **fields)
        yield call
        call.cancel()


@contextlib.asynccontextmanager
async def unread_http(router, timeout_s=NEVER_S):
    """Opens a stream over a socket with small buffers and never reads it."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": MANY,
            "logprobs": True,
            "top_logprobs": 20,
            "stream": True,
        }
    ).encode()
    with socket.socket() as client:
        await connect_small(client, router.server.ports.http)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout: {timeout_s}\r\n"
        whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        await asyncio.get_running_loop().sock_sendall(client, whole)
        yield client


UNREAD = {"grpc": unread_grpc, "http": unread_http}


def num_inside(router):
    return router.server.context.gate.admission.num_inside


def was_cut(router, limit):
    return f'penstock:limited_total{{limit="{limit}",model_name="penstock-tiny"}} 1.0' in metrics(router)


def metrics(router):
    return router.server._metrics.render().decode()


@pytest.mark.parametrize("api", UNREAD)
async def test_the_slot_ends_with_the_work_not_with_the_reading(api):
    worker = await long_answers().start()
    limits = {"write_stall_s": NEVER_S, "read_grace_s": NEVER_S}
    async with running_router(worker, limits=limits, default_timeout_s=NEVER_S) as router, UNREAD[api](router):
        await worker.until(lambda fake: bool(fake.submits), 60.0)
        await until(lambda: not num_inside(router), 60.0)
        assert not worker.cancelled  # the worker computed everything
        assert "vllm:request_success_total{" not in metrics(router)  # its client has not read it


@pytest.mark.parametrize("api", UNREAD)
async def test_an_unread_stream_holds_no_slot_past_its_deadline(api):
    worker = await long_answers(pause_at=300).start()
    limits = {"write_stall_s": NEVER_S, "read_grace_s": NEVER_S}
    async with running_router(worker, limits=limits, default_timeout_s=NEVER_S, max_timeout_s=4.0) as router:
        async with UNREAD[api](router):
            await worker.until(lambda fake: bool(fake.submits), 60.0)
            assert num_inside(router) == 1
            await until(lambda: not num_inside(router), 60.0)
            await worker.until(lambda fake: bool(fake.cancelled), 60.0)


@pytest.mark.parametrize("api", UNREAD)
async def test_a_client_that_reads_nothing_is_disconnected(api):
    worker = await long_answers().start()
    limits = {"write_stall_s": 0.2, "read_grace_s": NEVER_S}
    async with running_router(worker, limits=limits, default_timeout_s=NEVER_S) as router:
        async with UNREAD[api](router) as client:
            await until(lambda: was_cut(router, "write_stall_s"), 60.0)
            await until(lambda: not num_inside(router), 60.0)
            await ends_early(api, client)


@pytest.mark.parametrize("api", UNREAD)
async def test_a_stream_is_disconnected_after_its_deadline_and_grace(api):
    worker = await long_answers().start()
    limits = {"write_stall_s": NEVER_S, "read_grace_s": 0.5}
    async with running_router(worker, limits=limits, max_timeout_s=5.0) as router:
        async with UNREAD[api](router) as client:  # it has no deadline of its own, so the default applies
            await until(lambda: was_cut(router, "read_grace_s"), 60.0)
            await until(lambda: not num_inside(router), 60.0)
            await ends_early(api, client)


async def test_clients_that_leave_while_their_messages_wait_cause_no_traceback(caplog):
    worker = await long_answers().start()
    limits = {"write_stall_s": NEVER_S, "read_grace_s": NEVER_S}
    async with running_router(worker, limits=limits, default_timeout_s=NEVER_S) as router:
        async with grpc.aio.insecure_channel(router.grpc_address, options=SMALL_WINDOWS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            # The first calls fill the connection's window, so later ones cannot send anything.
            calls = [stub.Generate(request("Hello", max_tokens=MANY, logprobs=20)) for _ in range(4)]
            await worker.until(lambda fake: len(fake.submits) == len(calls), 60.0)
            await until(lambda: not num_inside(router), 60.0)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def ends_early(api, client):
    """Reads a stream that stops before its end; over gRPC it has a status."""
    async with asyncio.timeout(30.0):
        if api == "grpc":
            with pytest.raises(grpc.RpcError) as caught:
                await collect(client)
            error = from_rpc_error(caught.value)
            assert isinstance(error, DeadlineExceeded)
            assert "the client did not read" in error.message
            return
        loop, parts = asyncio.get_running_loop(), []
        with contextlib.suppress(ConnectionResetError):
            while part := await loop.sock_recv(client, 1 << 16):
                parts.append(part)
        assert b"[DONE]" not in b"".join(parts)


async def test_output_generated_in_time_can_be_read_after_the_deadline():
    worker = await long_answers().start()
    async with running_router(worker, max_timeout_s=GENEROUS_S) as router:
        async with unread_grpc(router) as call:
            await until(lambda: bool(worker.submits) and not num_inside(router), 60.0)
            await asyncio.sleep(GENEROUS_S)  # past the deadline
            messages = await collect(call)
    assert sum(len(message.token_ids) for message in messages) == MANY


async def test_a_reader_that_pauses_between_reads_is_not_disconnected():
    cut = asyncio.Event()
    loop = asyncio.get_running_loop()
    limits = LimitsConfig(write_stall_s=0.2, read_grace_s=NEVER_S)
    watch = ReaderWatch("r", loop.time() + NEVER_S, limits, RouterMetrics("m"), cut.set)
    for _ in range(4):
        with watch:
            pass
        await asyncio.sleep(0.1)
    assert not cut.is_set()
    with watch:
        await asyncio.wait_for(cut.wait(), 60.0)
