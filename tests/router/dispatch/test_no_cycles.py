"""Tests that an ended request is freed at once: in a cycle it would wait for the garbage collector, which stops the
event loop to free it."""

from __future__ import annotations

import gc
import weakref

import pytest

from router.dispatch import dispatcher
from router.dispatch.token_stream import TokenStream
from tests.router.api.test_grpc_service import collect, request
from tests.support.router.router_fakes import FakeWorker, running_router, until


@pytest.fixture
def streams(monkeypatch):
    """Returns weak references to the streams of all requests, and keeps the garbage collector off."""
    found = []

    class WatchedStream(TokenStream):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(weakref.ref(self))

    monkeypatch.setattr(dispatcher, "TokenStream", WatchedStream)
    gc.disable()
    yield found
    gc.enable()


async def test_a_served_request_leaves_no_cycle(streams):
    async with running_router(await FakeWorker().start()) as router:
        assert await collect(router.stub.Generate(request("tell me", max_tokens=5, n=2)))
        assert len(streams) == 1
        await until(lambda: streams[0]() is None)


async def test_a_cancelled_request_leaves_no_cycle(streams):
    async with running_router(await FakeWorker(pause_at=2).start()) as router:
        call = router.stub.Generate(request("tell me", max_tokens=50))
        await call.read()
        call.cancel()
        await until(lambda: streams[0]() is None)
