"""The public client for asyncio: `penstock.client` with `async for` and `await`.

async with AsyncClient("localhost:50051") as client:
    async for chunk in client.generate("Once upon a time", max_tokens=40):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc
import grpc.aio

from penstock.client import CHANNEL_OPTIONS, INCOMPLETE, UNARY_TIMEOUT_S
from penstock.client_auth import ClientTls, auth_metadata
from penstock.completions import (
    ChatMessage,
    Chunk,
    ModelInfo,
    Prompt,
    Result,
    ResultBuilder,
    SamplingOptions,
    Tokens,
    build_request,
    build_tokenize_request,
    chunk_from_wire,
    models_from_wire,
)
from penstock.continuation import Continuation
from penstock.errors import Cancelled, InternalError, InvalidInput, from_rpc_error
from penstock.hints import hints_metadata, read_decision
from penstock.retry import DEFAULT_RETRY, Attempts, RetryBudget, RetryPolicy
from penstock.routed_call import WorkerChannels, channel_options
from penstock.routed_call_async import AsyncRoutedCall
from penstock.types import Lane
from penstock.v1 import inference_pb2, inference_pb2_grpc

AnswerT = TypeVar("AnswerT")
RequestT = TypeVar("RequestT")


class AsyncGenerateStream:
    """Chunks of one running call. Closing it, or leaving its `async with` block, cancels the call everywhere."""

    def __init__(
        self,
        start: Callable[[inference_pb2.GenerateRequest, float | None], grpc.aio.UnaryStreamCall],
        request: inference_pb2.GenerateRequest,
        attempts: Attempts,
    ) -> None:
        """`start` begins an attempt with the time left in seconds."""
        self._start = start
        self._continuation = Continuation(request)
        self._attempts = attempts
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._call = self._begin()

    def _begin(self) -> grpc.aio.UnaryStreamCall:
        return self._start(self._continuation.request(), self._attempts.timeout_s(time.monotonic()))

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """Raises the typed error of the call, Cancelled where the stream is closed while this waits."""
        while True:
            if self._closed.is_set():
                raise StopAsyncIteration
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                await self._wait_for_retry(error)
                continue
            except asyncio.CancelledError:
                if self._closed.is_set():
                    raise Cancelled("the stream was closed") from None
                self._call.cancel()  # the reading task was cancelled, and nobody is left to read
                raise
            if message is grpc.aio.EOF:
                raise StopAsyncIteration
            self._continuation.on_message(message)
            self._attempts.progress(time.monotonic())
            return chunk_from_wire(message)

    async def _wait_for_retry(self, rpc_error: grpc.RpcError) -> None:
        error = from_rpc_error(rpc_error)
        if self._continuation.is_over:
            raise error from None
        delay_s = self._attempts.next_delay_s(error, time.monotonic(), random.random)
        try:
            await asyncio.wait_for(self._closed.wait(), delay_s)
        except TimeoutError:
            self._call = self._begin()
            return
        raise Cancelled("the stream was closed")

    async def complete(self) -> Result:
        """Returns the whole of what is still to come."""
        builder = ResultBuilder()
        async for chunk in self:
            builder.add(chunk)
        if not builder.finished:
            raise Cancelled("the stream was closed") if self._closed.is_set() else InternalError(INCOMPLETE)
        return replace(builder.result(), decision=await self.decision())

    async def decision(self) -> dict[str, Any] | None:
        """Why the request went where it did, once the stream has ended and where `explain` asked for it."""
        return read_decision(await self._call.trailing_metadata()) if self._call.done() else None

    def close(self) -> None:
        """Cancels the call; may be called twice."""
        self._closed.set()
        self._call.cancel()

    def __del__(self) -> None:
        # A stream that nobody reads to its end must not keep workers busy. Garbage is collected on any thread.
        call = getattr(self, "_call", None)  # absent where the very first attempt could not begin
        if call is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call.cancel)

    async def __aenter__(self) -> AsyncGenerateStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A connection to one deployment's gRPC address. Make and use it inside one running event loop."""

    def __init__(
        self,
        target: str | Sequence[str] = "localhost:50051",
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        lookaside: bool = False,
    ) -> None:
        """`target` is a router's host:port, or those of several: calls and streams of a lost one go on at another.

        `timeout_s` is the deadline of calls that name none; without either, the router's default holds.

        `api_key` is read from PENSTOCK_API_KEY where it is not given. `tls` turns encryption on; `credentials` do so
        too, for whoever has made their own.

        With `lookaside` streams come from the decode workers themselves, where the deployment has that on: routers
        choose and admit, and are off the tokens' way. What breaks off goes on through them.
        """
        self._timeout_s = timeout_s
        self._retry = retry
        self._retry_budget = RetryBudget()
        self._metadata = auth_metadata(api_key)
        credentials = credentials or (tls.credentials() if tls else None)
        options = [*CHANNEL_OPTIONS, *(tls.options() if tls else ())]
        secure, insecure = grpc.aio.secure_channel, grpc.aio.insecure_channel
        targets = [target] if isinstance(target, str) else list(target)
        if not targets:
            raise InvalidInput("target", "is empty; give the host:port of at least one router")
        self._channels = [
            secure(one, credentials, options=options) if credentials else insecure(one, options=options)
            for one in targets
        ]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._turn = 0  # the target that calls begin with
        self._targets = targets
        self._lookaside = lookaside
        near = channel_options(options)
        self._workers = WorkerChannels(
            lambda one: secure(one, credentials, options=near) if credentials else insecure(one, options=near)
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        lane: Lane | str | None = None,
        timeout_s: float | None = None,
        session: str = "",
        explain: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerateStream:
        """Starts to generate; iterate over the stream for chunks, or await its `complete()`.

        `prompt` is text, token ids, or chat messages. `timeout_s` bounds the whole call, retries included. `lane` is
        interactive, standard or bulk; left out, it is the caller's own. Requests of one `session` go to the same
        workers where that costs little; with `explain` the stream's `decision` tells why they were chosen.
        Raises InvalidInput at once for what no server could read; every other error comes from the stream.
        """
        request = build_request(prompt, sampling, model=model, request_id=request_id, lane=lane)
        attempts = self._attempts(timeout_s, self._timeout_s)
        hints = hints_metadata(session, explain)
        begin = self._begin_routed(hints) if self._lookaside else self._begin(lambda stub: stub.Generate, hints)
        return AsyncGenerateStream(begin, request, attempts)

    async def complete(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        lane: Lane | str | None = None,
        timeout_s: float | None = None,
        session: str = "",
        explain: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Result:
        """Generates and returns the whole answer."""
        async with self.generate(
            prompt,
            model=model,
            request_id=request_id,
            lane=lane,
            timeout_s=timeout_s,
            session=session,
            explain=explain,
            **sampling,
        ) as stream:
            return await stream.complete()

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """The token ids of a text, or of messages as the model's chat template renders them."""
        request = build_tokenize_request(prompt, model)
        answer = await self._call(self._begin(lambda stub: stub.Tokenize), request, timeout_s)
        return Tokens(tuple(answer.token_ids), tuple(answer.tokens))

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        request = inference_pb2.ListModelsRequest()
        answer = await self._call(self._begin(lambda stub: stub.ListModels), request, timeout_s)
        return models_from_wire(answer.models)

    def _begin(
        self,
        method: Callable[[inference_pb2_grpc.InferenceStub], Callable[..., AnswerT]],
        hints: tuple[tuple[str, str], ...] = (),
    ) -> Callable[[RequestT, float | None], AnswerT]:
        """One attempt at a call, given the request and the time left for it; every further one at the next router."""
        tried, metadata = False, (*self._metadata, *hints)

        def attempt(request: RequestT, left_s: float | None) -> AnswerT:
            nonlocal tried
            self._turn += tried
            tried = True
            stub = self._stubs[self._turn % len(self._stubs)]
            return method(stub)(request, timeout=left_s, metadata=metadata)

        return attempt

    def _begin_routed(
        self, hints: tuple[tuple[str, str], ...]
    ) -> Callable[[inference_pb2.GenerateRequest, float | None], Any]:
        """As `_begin`. What ends without a token is not tried there again: the worker may be out of our reach."""
        metadata, last = (*self._metadata, *hints), None

        def attempt(request: inference_pb2.GenerateRequest, left_s: float | None) -> Any:
            nonlocal last
            self._turn += last is not None
            number = self._turn % len(self._stubs)
            if last is not None and last.has_failed_there:
                return self._stubs[number].Generate(request, timeout=left_s, metadata=metadata)
            last = AsyncRoutedCall(self._targets[number], self._stubs[number], self._workers, request, left_s, metadata)
            return last

        return attempt

    async def _call(
        self, start: Callable[[RequestT, float | None], Awaitable[AnswerT]], request: RequestT, timeout_s: float | None
    ) -> AnswerT:
        attempts = self._attempts(timeout_s, UNARY_TIMEOUT_S)
        while True:
            try:
                answer = await start(request, attempts.timeout_s(time.monotonic()))
            except grpc.RpcError as error:
                delay_s = attempts.next_delay_s(from_rpc_error(error), time.monotonic(), random.random)
                await asyncio.sleep(delay_s)
                continue
            attempts.progress(time.monotonic())
            return answer

    def _attempts(self, timeout_s: float | None, default_s: float | None) -> Attempts:
        limit_s = timeout_s if timeout_s is not None else default_s
        return Attempts(self._retry, None if limit_s is None else time.monotonic() + limit_s, self._retry_budget)

    async def close(self) -> None:
        """Ends every call of this client."""
        for channel in (*self._channels, *self._workers.take_all()):
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
