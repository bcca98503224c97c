"""Runs calls of the asyncio client: their chunks, their retries, and lookaside attempts with the same interface."""

from __future__ import annotations

import asyncio  # async only
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc

from penstock.client import async_io as io
from penstock.client.channels import (
    WorkerChannels,
    error_of,
    failure_of,
    has_no_lookaside,
    is_unreachable,
    worker_address,
)
from penstock.client.results import Chunk, GenerateResult, ResultBuilder, chunk_from_wire
from penstock.client.retry import Attempts, Continuation
from penstock.errors import Cancelled, InternalError
from penstock.rpc.hints import read_decision
from penstock.v1 import inference_pb2, inference_pb2_grpc

Start = Callable[[inference_pb2.GenerateRequest, float | None], Any]
_INCOMPLETE = "the stream ended without a finish reason and usage; the server is at fault"


class AsyncGenerateStream:
    """Chunks of one running call. Closing it, or leaving its `async with` block, cancels the call on every worker."""

    def __init__(
        self, start: Start, request: inference_pb2.GenerateRequest, attempts: Attempts, targets: Sequence[str]
    ) -> None:
        """`start` begins an attempt with the time left in seconds; `targets` are the routers that errors name."""
        self._start = start
        self._continuation = Continuation(request)
        self._attempts = attempts
        self._targets = targets
        self._closed = io.Event()
        self._loop = asyncio.get_running_loop()  # async only
        self._begin()

    def _begin(self) -> None:
        self._call = self._start(self._continuation.request(), self._attempts.timeout_s(time.monotonic()))
        self._messages = aiter(self._call)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """Waits for the next tokens. Raises the call's typed error, or Cancelled if the stream gets closed."""
        while True:
            if self._closed.is_set():
                raise StopAsyncIteration
            try:
                message = await io.next_message(self._call, self._messages, self._closed)
            except grpc.RpcError as error:
                await self._wait_for_retry(error)
                continue
            self._continuation.on_message(message)
            self._attempts.progress(time.monotonic())
            return chunk_from_wire(message)

    async def _wait_for_retry(self, rpc_error: grpc.RpcError) -> None:
        error = error_of(rpc_error, self._targets)
        if self._continuation.is_over:
            raise error from None
        delay_s = self._attempts.next_delay_s(error, time.monotonic(), random.random, failure_of(rpc_error))
        if await io.wait(self._closed, delay_s):
            raise Cancelled(io.CLOSED) from None
        self._begin()

    async def complete(self) -> GenerateResult:
        """Waits for the end and returns everything not read yet."""
        builder = ResultBuilder()
        async for chunk in self:
            builder.add(chunk)
        if not builder.finished:
            raise Cancelled(io.CLOSED) if self._closed.is_set() else InternalError(_INCOMPLETE)
        return replace(builder.result(), decision=await self._read_decision())

    # sync only: @property
    async def decision(self) -> dict[str, Any] | None:
        """Why the request's workers were chosen; known once the stream has ended, if `explain` was set."""
        return await self._read_decision()

    async def _read_decision(self) -> dict[str, Any] | None:
        return read_decision(await self._call.trailing_metadata()) if self._call.done() else None

    def close(self) -> None:
        """Cancels the call. May be called repeatedly, and while a reader waits."""
        self._closed.set()
        self._call.cancel()

    def __del__(self) -> None:  # async only
        # An abandoned stream must not keep workers busy. Any thread may run this.
        call = getattr(self, "_call", None)  # missing if the first attempt could not begin
        if call is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call.cancel)

    async def __aenter__(self) -> AsyncGenerateStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncRoutedCall:
    """An attempt at a lookaside stream: `Route` at the router, then `Stream` at the worker. It has the interface of a
    `Generate` call, and becomes one if the deployment has no lookaside. Sends `Route` at once and waits in the first
    read.
    """

    def __init__(
        self,
        router: str,
        stub: inference_pb2_grpc.InferenceStub,
        channels: WorkerChannels,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._router = router
        self._stub = stub
        self._channels = channels
        self._request = request
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._route = io.start(stub.Route, request, timeout=timeout_s, metadata=metadata)
        self._stream: Any = None
        self._messages: Any = None
        self._address = ""  # the worker's address while this call uses its channel
        self._lock = threading.Lock()
        self._cancelled = False
        self._has_answered = False

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        return self

    async def __anext__(self) -> inference_pb2.GenerateResponse:
        """Raises RpcError of the call that failed, or Cancelled."""
        if self._stream is None:
            await self._begin()
        try:
            message: inference_pb2.GenerateResponse = await anext(self._messages)
        except StopAsyncIteration:
            self._release(broken=False)
            raise
        except grpc.RpcError as error:
            unused = self._release(broken=is_unreachable(error))
            if unused is not None:
                await unused.close()
            raise
        self._has_answered = True
        return message

    async def _begin(self) -> None:
        try:
            route = await io.answer(self._route)
        except grpc.RpcError as error:
            if not has_no_lookaside(error):
                raise
            self._open(lambda: self._stub.Generate(self._request, timeout=self._timeout_s, metadata=self._metadata))
            return
        address = worker_address(route, self._router)
        self._open(lambda: self._stream_from(address, route.ticket))

    def _stream_from(self, address: str, ticket: bytes) -> Any:
        self._address = address
        stub = inference_pb2_grpc.LookasideStub(self._channels.acquire(address))
        return stub.Stream(inference_pb2.StreamRequest(ticket=ticket), timeout=self._timeout_s)

    def _open(self, start: Callable[[], Any]) -> None:
        with self._lock:
            if self._cancelled:
                raise Cancelled(io.CLOSED)
            self._stream = start()
            self._messages = aiter(self._stream)

    @property
    def has_failed_there(self) -> bool:
        """Returns whether the call was routed to a worker but no token came."""
        return self._stream is not None and not self._has_answered

    def _release(self, *, broken: bool) -> Any | None:
        """Releases the worker's channel. Returns it if the caller must close it."""
        with self._lock:
            address, self._address = self._address, ""
        return self._channels.release(address, broken=broken) if address else None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
        self._route.cancel()
        if self._stream is not None:
            self._stream.cancel()
            self._release(broken=False)

    def done(self) -> bool:
        return self._stream is not None and bool(self._stream.done())

    async def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        """Returns the metadata of both calls: the router sends its decision with the route."""
        return [*(await self._route.trailing_metadata() or ()), *(await self._stream.trailing_metadata() or ())]

    # sync only: def __del__(self) -> None:
    # sync only:     if self._stream is not None:
    # sync only:         self._release(broken=False)
