"""Tests that large messages are freed with their call: none waits in a reference cycle for the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.message import Message

from benchmarks.attack.sockets import http_request
from penstock.v1 import inference_pb2
from tests.support.router.router_fakes import FakeWorker, running_router

SERVED = "a long text"
_LARGE = 1 << 20  # characters


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Turns the collector off, so that what it would free can still be found."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def large_garbage() -> list[str]:
    """Returns objects that hold large texts and that only the collector can reach."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    return [
        f"{holder!r:.120} holds {type(held).__name__}"
        for holder in gc.garbage
        for held in gc.get_referents(holder)
        if _size(held) > _LARGE // 16
    ]


def _size(held: object) -> int:
    if isinstance(held, Message):
        return held.ByteSize()
    return len(held) if isinstance(held, str | bytes | bytearray | list) else 0


WORDS = "word " * (_LARGE // 5)
SERVED_WORDS = WORDS[: _LARGE // 4]
REQUESTS: dict[str, Callable[[], bytes]] = {
    "too long a text": lambda: inference_pb2.GenerateRequest(text=WORDS).SerializeToString(),
    "too many tokens": lambda: inference_pb2.GenerateRequest(token_ids=range(_LARGE)).SerializeToString(),
    "no message": lambda: b"\xff" * _LARGE,
    "no UTF-8": lambda: b"\x12\x04\xff\xff\xff\xff" + b"\x0a" * _LARGE,
    "too many fields": lambda: b"\x0a\x00" * _LARGE,
    SERVED: lambda: inference_pb2.GenerateRequest(text=SERVED_WORDS, sampling={"max_tokens": 1}).SerializeToString(),
}
BODIES: dict[str, Callable[[], bytes]] = {
    "too long a text": lambda: json.dumps({"prompt": WORDS}).encode(),
    "a chat": lambda: json.dumps({"messages": [{"role": "user", "content": WORDS}]}).encode(),
    "objects": lambda: b'{"prompt":[' + b",".join([b"{}"] * (_LARGE // 4)) + b"]}",
    "depth": lambda: b"[" * _LARGE,
    SERVED: lambda: json.dumps({"prompt": SERVED_WORDS, "max_tokens": 1}).encode(),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_large_grpc_message_is_freed_with_its_call(name: str, uncollected: None) -> None:
    async with running_router(await FakeWorker(context_length=1 << 20 if name == SERVED else 2048).start()) as router:
        message = REQUESTS[name]()
        for method in ("Generate", "Tokenize"):
            call = router.channel.unary_stream(f"/penstock.v1.Inference/{method}")
            with contextlib.suppress(grpc.RpcError):
                async for _ in call(message):
                    pass
        assert not large_garbage()


@pytest.mark.parametrize("name", BODIES)
async def test_a_large_body_is_freed_with_its_call(name: str, uncollected: None) -> None:
    async with running_router(await FakeWorker(context_length=1 << 20 if name == SERVED else 2048).start()) as router:
        path = "/v1/chat/completions" if name == "a chat" else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n".encode()
        status, _ = await http_request(router.http_url.removeprefix("http://"), head, BODIES[name]())
        assert status == (200 if name == SERVED else 400)
        assert not large_garbage()
