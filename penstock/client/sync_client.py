# Generated from penstock/client/async_client.py by tests/support/repository/blocking_client.py (make client).
"""The blocking public client.

    with Client("localhost:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=40):
            print(chunk.text, end="", flush=True)

Every call raises typed errors (`penstock.errors`). UNAVAILABLE is retried with backoff, at the next router if there are
several; a stream continues after the tokens it has received. A refused connection is retried until the call's deadline,
so a replaced router only causes a pause.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from penstock.client import sync_io as io
from penstock.client.auth import ClientTls, auth_metadata
from penstock.client.channels import CHANNEL_OPTIONS, WorkerChannels, error_of, failure_of, worker_options
from penstock.client.chat import Chat, ChatMessage
from penstock.client.results import (
    GenerateResult,
    ModelInfo,
    Prompt,
    SamplingOptions,
    Tokens,
    build_request,
    build_tokenize_request,
    models_from_wire,
)
from penstock.client.retry import DEFAULT_RETRY, Attempts, RetryBudget, RetryPolicy
from penstock.client.sync_stream import GenerateStream, RoutedCall, Start
from penstock.client.tracing import trace_metadata
from penstock.errors import InvalidInput
from penstock.kv.kv_hints import NO_KV_HINTS, KvHints
from penstock.rpc.hints import hints_metadata
from penstock.types import Lane
from penstock.v1 import inference_pb2, inference_pb2_grpc

UNARY_TIMEOUT_S = 30.0  # default deadline of tokenize and list_models

Method = Callable[[inference_pb2_grpc.InferenceStub], Any]


class Client:
    """A connection to one deployment's gRPC address. Create and use it inside one running event loop."""

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
        """`target` is the host:port of one router or a list of several; if one is lost, its calls and streams continue
        at another.

        `timeout_s` is the deadline of calls that name none; without either, the router's default applies. `api_key`
        defaults to PENSTOCK_API_KEY. `tls` turns encryption on, and so do your own `credentials`.

        With `lookaside`, streams come straight from the decode workers if the deployment allows it: routers admit and
        place requests, but do not relay tokens. A stream that breaks off continues through a router.
        """
        self._timeout_s = timeout_s
        self._retry = retry
        self._retry_budget = RetryBudget()
        self._metadata = auth_metadata(api_key)
        credentials = credentials or (tls.credentials() if tls else None)
        options = [*CHANNEL_OPTIONS, *(tls.options() if tls else ())]
        targets = [target] if isinstance(target, str) else list(target)
        if not targets:
            raise InvalidInput("target", "is empty; give the host:port of at least one router")
        self._targets = targets
        self._channels = [io.connect(address, credentials, options) for address in targets]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._next_target = 0  # index of the next call's first target, modulo their number
        self._lookaside = lookaside
        near = worker_options(options)
        self._workers = WorkerChannels(lambda address: io.connect(address, credentials, near))

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
        kv_hints: KvHints = NO_KV_HINTS,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerateStream:
        """Starts a generation; iterate over the stream for chunks, or call its `complete()` for the whole answer.

        `prompt` is text, token ids, chat messages, or a `Chat` of them. `timeout_s` bounds the whole call, retries
        included. `lane` is interactive, standard or bulk, by default the tenant's own. Requests of one `session` go to
        the same workers if that costs little; with `explain`, the stream's `decision` says why they were chosen. The
        `timing` of the first completion holds the outcome of each of the `kv_hints`. A call inside an OpenTelemetry
        span becomes part of its trace. Raises InvalidInput at once for a malformed prompt or option; every other error
        comes from the stream.
        """
        request = build_request(prompt, sampling, model=model, request_id=request_id, lane=lane, kv_hints=kv_hints)
        attempts = self._attempts(timeout_s, self._timeout_s)
        hints = (*hints_metadata(session, explain), *trace_metadata())
        begin = self._begin_routed(hints) if self._lookaside else self._begin(lambda stub: stub.Generate, hints)
        return GenerateStream(begin, request, attempts, self._targets)

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
        kv_hints: KvHints = NO_KV_HINTS,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerateResult:
        """Generates and returns the whole answer."""
        with self.generate(
            prompt,
            model=model,
            request_id=request_id,
            lane=lane,
            timeout_s=timeout_s,
            session=session,
            explain=explain,
            kv_hints=kv_hints,
            **sampling,
        ) as stream:
            return stream.complete()

    def tokenize(
        self, prompt: str | Sequence[ChatMessage] | Chat, *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """Returns the token ids of a text, or of messages as the model's chat template renders them."""
        request = build_tokenize_request(prompt, model)
        answer = self._call(self._begin(lambda stub: stub.Tokenize), request, timeout_s)
        return Tokens(tuple(answer.token_ids), tuple(answer.tokens))

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        request = inference_pb2.ListModelsRequest()
        answer = self._call(self._begin(lambda stub: stub.ListModels), request, timeout_s)
        return models_from_wire(answer.models)

    def _begin(self, method: Method, hints: tuple[tuple[str, str], ...] = ()) -> Callable[[Any, float | None], Any]:
        """Returns a function that starts an attempt with the time left; each further attempt takes the next router."""
        tried, metadata = False, (*self._metadata, *hints)

        def attempt(request: Any, left_s: float | None) -> Any:
            nonlocal tried
            self._next_target += tried
            tried = True
            stub = self._stubs[self._next_target % len(self._stubs)]
            return method(stub)(request, timeout=left_s, metadata=metadata)

        return attempt

    def _begin_routed(self, hints: tuple[tuple[str, str], ...]) -> Start:
        """Does the same with lookaside. After an attempt without a token the next one goes through the router, since
        the client may be unable to reach the worker.
        """
        metadata, last = (*self._metadata, *hints), None

        def attempt(request: inference_pb2.GenerateRequest, left_s: float | None) -> Any:
            nonlocal last
            self._next_target += last is not None
            number = self._next_target % len(self._stubs)
            if last is not None and last.has_failed_there:
                return self._stubs[number].Generate(request, timeout=left_s, metadata=metadata)
            last = RoutedCall(self._targets[number], self._stubs[number], self._workers, request, left_s, metadata)
            return last

        return attempt

    def _call(self, start: Callable[[Any, float | None], Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s, UNARY_TIMEOUT_S)
        while True:
            try:
                answer = start(request, attempts.timeout_s(time.monotonic()))
            except grpc.RpcError as error:
                delay_s = attempts.next_delay_s(
                    error_of(error, self._targets), time.monotonic(), random.random, failure_of(error)
                )
                io.sleep(delay_s)
                continue
            attempts.progress(time.monotonic())
            return answer

    def _attempts(self, timeout_s: float | None, default_s: float | None) -> Attempts:
        limit_s = timeout_s if timeout_s is not None else default_s
        return Attempts(self._retry, None if limit_s is None else time.monotonic() + limit_s, self._retry_budget)

    def close(self) -> None:
        """Ends every call of this client."""
        for channel in (*self._channels, *self._workers.remove_all()):
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
