"""The public client, blocking. `penstock.async_client` is its twin for asyncio.

    with Client("localhost:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=40):
            print(chunk.text, end="", flush=True)

Every call has typed errors (`penstock.errors`). UNAVAILABLE is tried again with backoff, at the next router where
several are given; a stream that has got tokens goes on after them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

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
from penstock.config import MAX_MESSAGE_BYTES
from penstock.continuation import Continuation
from penstock.errors import Cancelled, InternalError, InvalidInput, from_rpc_error
from penstock.hints import hints_metadata, read_decision
from penstock.retry import DEFAULT_RETRY, Attempts, RetryBudget, RetryPolicy
from penstock.routed_call import RoutedCall, WorkerChannels, channel_options
from penstock.types import Lane
from penstock.v1 import inference_pb2, inference_pb2_grpc

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # ours are the only ones: they know when the first token came
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
UNARY_TIMEOUT_S = 30.0  # of tokenize and list_models
INCOMPLETE = "the stream ended without a finish reason and usage; the server is at fault"

AnswerT = TypeVar("AnswerT")
RequestT = TypeVar("RequestT")


class GenerateStream:
    """Chunks of one running call. Closing it, or leaving its `with` block, cancels the call on every worker."""

    def __init__(
        self,
        start: Callable[[inference_pb2.GenerateRequest, float | None], grpc.Call],
        request: inference_pb2.GenerateRequest,
        attempts: Attempts,
    ) -> None:
        """`start` begins an attempt with the time left in seconds."""
        self._start = start
        self._continuation = Continuation(request)
        self._attempts = attempts
        self._closed = threading.Event()
        self._call = self._begin()

    def _begin(self) -> grpc.Call:
        return self._start(self._continuation.request(), self._attempts.timeout_s(time.monotonic()))

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """Blocks until the next tokens. Raises the typed error of the call, Cancelled once it was closed."""
        while True:
            if self._closed.is_set():
                raise StopIteration
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                self._wait_for_retry(error)
                continue
            self._continuation.on_message(message)
            self._attempts.progress(time.monotonic())
            return chunk_from_wire(message)

    def _wait_for_retry(self, rpc_error: grpc.RpcError) -> None:
        if self._closed.is_set():
            raise Cancelled("the stream was closed") from None
        error = from_rpc_error(rpc_error)
        if self._continuation.is_over:
            raise error from None
        if self._closed.wait(self._attempts.next_delay_s(error, time.monotonic(), random.random)):
            raise Cancelled("the stream was closed") from None
        self._call = self._begin()

    def complete(self) -> Result:
        """Blocks until the end and returns the whole of what is still to come."""
        builder = ResultBuilder()
        for chunk in self:
            builder.add(chunk)
        if not builder.finished:
            raise Cancelled("the stream was closed") if self._closed.is_set() else InternalError(INCOMPLETE)
        return replace(builder.result(), decision=self.decision)

    @property
    def decision(self) -> dict[str, Any] | None:
        """Why the request went where it did, once the stream has ended and where `explain` asked for it."""
        return None if self._call.is_active() else read_decision(self._call.trailing_metadata())

    def close(self) -> None:
        """Cancels the call; may be called from another thread, and twice."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> GenerateStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A connection to one deployment's gRPC address. Thread-safe; connects on first use."""

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
        secure, insecure = grpc.secure_channel, grpc.insecure_channel
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
    ) -> GenerateStream:
        """Starts to generate; iterate over the stream for chunks, or call its `complete()`.

        `prompt` is text, token ids, or chat messages. `timeout_s` bounds the whole call, retries included. `lane` is
        interactive, standard or bulk; left out, it is the caller's own. Requests of one `session` go to the same
        workers where that costs little; with `explain` the stream's `decision` tells why they were chosen.
        Raises InvalidInput at once for what no server could read; every other error comes from the stream.
        """
        request = build_request(prompt, sampling, model=model, request_id=request_id, lane=lane)
        attempts = self._attempts(timeout_s, self._timeout_s)
        hints = hints_metadata(session, explain)
        begin = self._begin_routed(hints) if self._lookaside else self._begin(lambda stub: stub.Generate, hints)
        return GenerateStream(begin, request, attempts)

    def complete(
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
        with self.generate(
            prompt,
            model=model,
            request_id=request_id,
            lane=lane,
            timeout_s=timeout_s,
            session=session,
            explain=explain,
            **sampling,
        ) as stream:
            return stream.complete()

    def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """The token ids of a text, or of messages as the model's chat template renders them."""
        request = build_tokenize_request(prompt, model)
        answer = self._call(self._begin(lambda stub: stub.Tokenize), request, timeout_s)
        return Tokens(tuple(answer.token_ids), tuple(answer.tokens))

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        request = inference_pb2.ListModelsRequest()
        answer = self._call(self._begin(lambda stub: stub.ListModels), request, timeout_s)
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
            last = RoutedCall(self._targets[number], self._stubs[number], self._workers, request, left_s, metadata)
            return last

        return attempt

    def _call(
        self, start: Callable[[RequestT, float | None], AnswerT], request: RequestT, timeout_s: float | None
    ) -> AnswerT:
        attempts = self._attempts(timeout_s, UNARY_TIMEOUT_S)
        while True:
            try:
                answer = start(request, attempts.timeout_s(time.monotonic()))
            except grpc.RpcError as error:
                delay_s = attempts.next_delay_s(from_rpc_error(error), time.monotonic(), random.random)
                time.sleep(delay_s)
                continue
            attempts.progress(time.monotonic())
            return answer

    def _attempts(self, timeout_s: float | None, default_s: float | None) -> Attempts:
        limit_s = timeout_s if timeout_s is not None else default_s
        return Attempts(self._retry, None if limit_s is None else time.monotonic() + limit_s, self._retry_budget)

    def close(self) -> None:
        """Ends every call of this client."""
        for channel in (*self._channels, *self._workers.take_all()):
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
